{{/*
What a schema cannot say, or not in words that help. Included by every rendering (templates/config.yaml).
*/}}
{{- define "kvferry.checks" -}}
{{- $v := .Values -}}
{{- $device := dig "engine" "device" "cpu" $v.config -}}
{{- $tp := int (dig "engine" "tensor_parallel_size" 1 $v.config) -}}

{{- if and (eq (int $v.roles.prefill.replicas) 0) (not $v.aggregated) -}}
{{- fail "roles.prefill.replicas is 0: decode workers need prefill workers. Say aggregated: true if they are to compute prompts themselves" -}}
{{- end -}}
{{- if and $v.aggregated (gt (int $v.roles.prefill.replicas) 0) -}}
{{- fail (printf "aggregated is true and roles.prefill.replicas is %d: with aggregated there are no prefill workers, so set it to 0" (int $v.roles.prefill.replicas)) -}}
{{- end -}}

{{- range $name := list "prefill" "decode" -}}
{{- $role := index $v.roles $name -}}
{{- if gt (int $role.replicas) 0 -}}
{{- if and (eq $device "gpu") (ne (int $role.gpusPerWorker) $tp) -}}
{{- fail (printf "roles.%s.gpusPerWorker is %d and config.engine.tensor_parallel_size is %d: a worker has as many GPUs as its engine uses" $name (int $role.gpusPerWorker) $tp) -}}
{{- end -}}
{{- if and (eq $device "cpu") (gt (int $role.gpusPerWorker) 0) -}}
{{- fail (printf "roles.%s.gpusPerWorker is %d and config.engine.device is cpu: say device: gpu, or 0 GPUs" $name (int $role.gpusPerWorker)) -}}
{{- end -}}
{{- $shm := include "kvferry.shmGiB" (dict "root" $ "role" $name) | float64 -}}
{{- if $v.tier.enabled -}}
{{- $cpu := mulf $role.workersPerPod $v.tier.cpuGiB -}}
{{- if lt $shm $cpu -}}
{{- fail (printf "tier.shmGiB is %v and the CPU tiers of a %s pod take %v GiB (workersPerPod %v x tier.cpuGiB %v): give it at least that, or leave it empty" $shm $name $cpu $role.workersPerPod $v.tier.cpuGiB) -}}
{{- end -}}
{{- end -}}
{{- $tls := $role.env.UCX_TLS | default "all" | toString | replace " " "" -}}
{{- if not (or (hasPrefix "^" $tls) (has "tcp" (splitList "," $tls)) (has "all" (splitList "," $tls))) -}}
{{- fail (printf "roles.%s.env.UCX_TLS is %q and has no tcp: UCX agrees on a connection over it, whatever carries the pages. Add tcp" $name $tls) -}}
{{- end -}}
{{- range $resource, $value := $role.extraResources -}}
{{- include "kvferry.checkQuantity" (dict "value" $value "path" (printf "roles.%s.extraResources.%s" $name $resource)) -}}
{{- end -}}
{{- if le (float64 $role.memoryGiB) $shm -}}
{{- fail (printf "roles.%s.memoryGiB is %v and /dev/shm of the pod, which counts as its memory, is %v GiB: give it more" $name $role.memoryGiB $shm) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if $v.config.pools -}}
{{- fail "config.pools names pools of workers: this chart makes pods for the default pool only, so theirs would never start. Deploy them with `python -m kvferry.app deploy`" -}}
{{- end -}}

{{- if and $v.tier.enabled (not $v.tier.volumes) (not $v.tier.cpuOnly) -}}
{{- fail "tier.enabled is true and tier.volumes is empty: name a volume, or say tier.cpuOnly: true for the CPU tier alone" -}}
{{- end -}}
{{- if and $v.tier.cpuOnly (or $v.tier.volumes (not $v.tier.enabled)) -}}
{{- fail "tier.cpuOnly is true: it needs tier.enabled: true and no tier.volumes" -}}
{{- end -}}
{{- if and $v.tier.volumes (not $v.tier.enabled) -}}
{{- fail "tier.volumes are named and tier.enabled is false: volumes are read through the CPU tier, so enable it or leave them out" -}}
{{- end -}}
{{- if and $v.tier.encryptionKeysSecret (not $v.tier.volumes) -}}
{{- fail "tier.encryptionKeysSecret is named and there are no tier.volumes to seal" -}}
{{- end -}}
{{- $names := list -}}
{{- range $v.tier.volumes -}}
{{- $sources := len (compact (list (.hostPath | default "") (.storageClassName | default "") (.claimName | default ""))) -}}
{{- if ne $sources 1 -}}
{{- fail (printf "tier.volumes %q has %d of hostPath, storageClassName and claimName: exactly one says where it is" .name $sources) -}}
{{- end -}}
{{- if has .name $names -}}
{{- fail (printf "tier.volumes has two volumes named %q" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}

{{- if and $v.model.volume.claimName $v.model.volume.hostPath -}}
{{- fail "model.volume has both claimName and hostPath: name one" -}}
{{- end -}}
{{- $hasModelVolume := or $v.model.volume.claimName $v.model.volume.hostPath -}}
{{- if and $hasModelVolume (not (hasPrefix (printf "%s/" (trimSuffix "/" $v.model.volume.mountPath)) (printf "%s/" (trimSuffix "/" $v.config.model.path)))) -}}
{{- fail (printf "config.model.path is %q and model.volume is mounted at %q: the model's folder lies below it" $v.config.model.path $v.model.volume.mountPath) -}}
{{- end -}}
{{- if and (hasPrefix "/" $v.config.model.path) (not $hasModelVolume) (ne (dig "engine" "kind" "vllm" $v.config) "sim") -}}
{{- fail (printf "config.model.path is the folder %q: model.volume must say with claimName or hostPath where it comes from" $v.config.model.path) -}}
{{- end -}}
{{- if eq $v.config.model.path "default" -}}
{{- fail "config.model.path is default, which `kvferry up` prepares on one machine: name a hub id or a folder" -}}
{{- end -}}

{{- if and (not (include "kvferry.keysSecret" .)) (not $v.gateway.tls.requireClientCertificates) (not (has "gateway.host" $v.insecure)) -}}
{{- fail "gateways would serve whoever calls: name auth.keysSecret, let auth.generateKey make a key, set gateway.tls.requireClientCertificates, or add gateway.host to insecure" -}}
{{- end -}}
{{- if and $v.gateway.tls.requireClientCertificates (not $v.gateway.tls.secretName) -}}
{{- fail "gateway.tls.requireClientCertificates needs gateway.tls.secretName, with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if eq $v.gateway.mode "serve" -}}
{{- if ne (toString $v.gateway.podDisruptionBudget.maxUnavailable) (int $v.gateway.podDisruptionBudget.maxUnavailable | toString) -}}
{{- fail (printf "gateway.podDisruptionBudget.maxUnavailable is %q: with gateway.mode serve say a number, as Kubernetes counts no percentage of Ray's pods and then evicts none" (toString $v.gateway.podDisruptionBudget.maxUnavailable)) -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $resource, $value := (index $v.gateway.resources $kind | default dict) -}}
{{- include "kvferry.checkQuantity" (dict "value" $value "path" (printf "gateway.resources.%s.%s" $kind $resource)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $resource, $value := (index $v.model.download.resources $kind | default dict) -}}
{{- include "kvferry.checkQuantity" (dict "value" $value "path" (printf "model.download.resources.%s.%s" $kind $resource)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.gateway.autoscaling.enabled (ne $v.gateway.mode "deployment") -}}
{{- fail "gateway.autoscaling.enabled needs gateway.mode: deployment: Kubernetes cannot scale Serve replicas" -}}
{{- end -}}
{{- if and $v.gateway.autoscaling.enabled (gt (int $v.gateway.autoscaling.minReplicas) (int $v.gateway.autoscaling.maxReplicas)) -}}
{{- fail (printf "gateway.autoscaling.minReplicas is %d, more than maxReplicas %d" (int $v.gateway.autoscaling.minReplicas) (int $v.gateway.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and $v.gateway.gatewayApi.enabled (not $v.gateway.gatewayApi.parentRefs) -}}
{{- fail "gateway.gatewayApi.enabled needs gateway.gatewayApi.parentRefs: the gateway that routes are attached to" -}}
{{- end -}}
{{- if and $v.gateway.grpcPort (eq (int $v.gateway.grpcPort) (int $v.gateway.httpPort)) -}}
{{- fail (printf "gateway.httpPort and gateway.grpcPort are both %d" (int $v.gateway.httpPort)) -}}
{{- end -}}

{{- if and (eq $v.ray.mode "existing") (ne $v.gateway.mode "deployment") -}}
{{- fail "ray.mode existing needs gateway.mode: deployment: a service cannot find Serve replicas in pods that are not this chart's" -}}
{{- end -}}
{{- if and (eq $v.ray.mode "existing") (not $v.ray.existing.dashboardAddress) -}}
{{- fail "ray.mode existing needs ray.existing.dashboardAddress, such as http://ray-head-svc:8265" -}}
{{- end -}}
{{- if and (eq $v.ray.mode "existing") (include "kvferry.isHubId" .) -}}
{{- fail (printf "config.model.path is the hub id %q and ray.mode is existing: nothing downloads a model to that Ray's nodes. Name the folder that all of them have" $v.config.model.path) -}}
{{- end -}}
{{- if and (eq $v.ray.mode "existing") $v.etcd.enabled $v.networkPolicy.enabled (not $v.networkPolicy.rayFrom) -}}
{{- fail "ray.mode existing needs networkPolicy.rayFrom: this chart's etcd is fenced, and workers on that Ray's nodes must reach it" -}}
{{- end -}}
{{- if and $v.networkPolicy.rayFrom (ne $v.ray.mode "existing") -}}
{{- fail "networkPolicy.rayFrom is for ray.mode: existing; pods of this release reach its etcd without it" -}}
{{- end -}}
{{- if and $v.ray.gang.queue (not $v.ray.gang.scheduler) -}}
{{- fail "ray.gang.queue needs ray.gang.scheduler" -}}
{{- end -}}
{{- if and $v.ray.redis.passwordSecret (not $v.ray.redis.address) -}}
{{- fail "ray.redis.passwordSecret needs ray.redis.address" -}}
{{- end -}}

{{- if and $v.etcd.enabled $v.etcd.endpoints -}}
{{- fail "etcd.enabled is true and etcd.endpoints are named: run one, or use the one that is there" -}}
{{- end -}}
{{- if and (not $v.etcd.enabled) (not $v.etcd.endpoints) -}}
{{- fail "etcd.enabled is false and etcd.endpoints is empty: members must find each other somewhere" -}}
{{- end -}}
{{- if and $v.etcd.enabled (not $v.etcd.image.registry) (not $v.image.registry) -}}
{{- fail (printf "etcd.image.registry and image.registry are empty: %s is in no registry that container runtimes ask by themselves. Name one that has it: the etcd project's own, or yours" $v.etcd.image.repository) -}}
{{- end -}}
{{- if and $v.etcd.enabled (or $v.etcd.external.tlsSecret $v.etcd.external.user $v.etcd.external.passwordSecret) -}}
{{- fail "etcd.external is for etcd.enabled: false; the chart's own etcd has certificates and a user of its own" -}}
{{- end -}}
{{- if ne (empty $v.etcd.external.user) (empty $v.etcd.external.passwordSecret) -}}
{{- fail "etcd.external.user and etcd.external.passwordSecret go together" -}}
{{- end -}}

{{- $scraped := or $v.monitoring.serviceMonitor.enabled $v.monitoring.members.enabled -}}
{{- if and $v.monitoring.serviceMonitor.enabled $v.monitoring.members.enabled -}}
{{- fail "monitoring.members and monitoring.serviceMonitor are both enabled: gateways would be counted twice" -}}
{{- end -}}
{{- if and $scraped (include "kvferry.keysSecret" .) (not $v.monitoring.keySecret) (not (include "kvferry.firstKeySecret" .)) -}}
{{- fail "monitoring needs monitoring.keySecret: gateways ask for an API key, and only the hashes of auth.keysSecret are known here" -}}
{{- end -}}
{{- if and $scraped $v.gateway.tls.requireClientCertificates -}}
{{- fail "monitoring cannot ask gateways that require client certificates" -}}
{{- end -}}
{{- end -}}
