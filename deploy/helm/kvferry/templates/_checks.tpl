{{/*
What a schema cannot say, or not in words that help. Included by every rendering (templates/config.yaml).
*/}}
{{- define "kvferry.checks" -}}
{{- $v := .Values -}}
{{- $device := dig "engine" "device" "cpu" $v.config -}}
{{- $tp := int (dig "engine" "tensor_parallel_size" 1 $v.config) -}}

{{- $fullname := include "kvferry.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "objects would be named %q, after the release: services need small letters, digits and dashes, and a letter first. Name another one with fullnameOverride" $fullname) -}}
{{- end -}}

{{- $servesDefault := include "kvferry.servesDefault" . -}}
{{- if and (not $servesDefault) (not $v.config.models) -}}
{{- fail "roles.prefill.replicas and roles.decode.replicas are 0 and config.models is empty: there is no model to serve" -}}
{{- end -}}
{{- if and $servesDefault (eq (int $v.roles.decode.replicas) 0) -}}
{{- fail "roles.decode.replicas is 0: decode workers answer, so a model needs one. Without a default model (all are entries of config.models) roles.prefill.replicas is 0 too" -}}
{{- end -}}
{{- if and $servesDefault (eq (int $v.roles.prefill.replicas) 0) (not $v.aggregated) -}}
{{- fail "roles.prefill.replicas is 0: decode workers need prefill workers. Say aggregated: true if they are to compute prompts themselves" -}}
{{- end -}}
{{- if and $v.aggregated (gt (int $v.roles.prefill.replicas) 0) -}}
{{- fail (printf "aggregated is true and roles.prefill.replicas is %d: with aggregated there are no prefill workers, so set it to 0" (int $v.roles.prefill.replicas)) -}}
{{- end -}}

{{- range $group := include "kvferry.groups" . | fromJsonArray -}}
{{- $name := $group.name -}}
{{- $path := $group.path -}}
{{- $role := $group.role -}}
{{- $ofModel := $tp -}}
{{- $ofModelKey := "config.engine" -}}
{{- range $index, $entry := $v.config.models -}}
{{- if eq $entry.name $group.entry -}}
{{- $ofModel = int (dig "engine" "tensor_parallel_size" $tp $entry) -}}
{{- if dig "engine" "tensor_parallel_size" 0 $entry -}}{{- $ofModelKey = printf "config.models[%d].engine" $index -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $ranks := int (dig "engine" "tensor_parallel_size" $ofModel $role) -}}
{{- if and (eq $device "gpu") (ne (int $role.gpusPerWorker) $ranks) -}}
{{- $key := ternary $ofModelKey (printf "%s.engine" $path) (eq $ranks $ofModel) -}}
{{- fail (printf "%s.gpusPerWorker is %d and %s.tensor_parallel_size is %d: a worker has as many GPUs as its engine uses" $path (int $role.gpusPerWorker) $key $ranks) -}}
{{- end -}}
{{- if and (eq $device "cpu") (gt (int $role.gpusPerWorker) 0) -}}
{{- fail (printf "%s.gpusPerWorker is %d and config.engine.device is cpu: say device: gpu, or 0 GPUs" $path (int $role.gpusPerWorker)) -}}
{{- end -}}
{{- $shm := include "kvferry.shmGiB" (dict "root" $ "group" $group) | float64 -}}
{{- if $group.tier -}}
{{- $cpu := mulf $role.workersPerPod $group.cpuGiB -}}
{{- if lt $shm $cpu -}}
{{- fail (printf "tier.shmGiB is %v and the CPU tiers of a %s pod take %v GiB (workersPerPod %v x tier.cpuGiB %v): give it at least that, or leave it empty" $shm $name $cpu $role.workersPerPod $group.cpuGiB) -}}
{{- end -}}
{{- end -}}
{{- $draft := include "kvferry.draft" (dict "root" $ "entry" $group.entry) -}}
{{- $speculation := (dig "engine" "args" dict $role | default dict).speculative_config -}}
{{- if $speculation -}}
{{- $isNgram := and (kindIs "map" $speculation) (eq (toString $speculation.method) "ngram") -}}
{{- if or $draft (not $isNgram) (eq $group.kind "prefill") -}}
{{- fail (printf "%s.engine.args.speculative_config: n-grams stand in roles.decode.engine.args, where no draft model is; a draft model or EAGLE head is of both roles, in engine.args of config or of an entry of config.models" $path) -}}
{{- end -}}
{{- end -}}
{{- $tls := $role.env.UCX_TLS | default "all" | toString | replace " " "" -}}
{{- if not (or (hasPrefix "^" $tls) (has "tcp" (splitList "," $tls)) (has "all" (splitList "," $tls))) -}}
{{- fail (printf "%s.env.UCX_TLS is %q and has no tcp: UCX agrees on a connection over it, whatever carries the pages. Add tcp" $path $tls) -}}
{{- end -}}
{{- range $resource, $value := $role.extraResources -}}
{{- include "kvferry.checkQuantity" (dict "value" $value "path" (printf "%s.extraResources.%s" $path $resource)) -}}
{{- end -}}
{{- if and $role.dnsPolicy (not $role.hostNetwork) -}}
{{- fail (printf "%s.dnsPolicy is for %s.hostNetwork: true; other pods have the cluster's DNS" $path $path) -}}
{{- end -}}
{{- if and $role.hostNetwork (eq $v.ray.mode "existing") -}}
{{- fail (printf "%s.hostNetwork is true and ray.mode is existing: that Ray's pods are not this chart's" $path) -}}
{{- end -}}
{{- if and $role.hostNetwork $role.affinity -}}
{{- $apart := false -}}
{{- range (dig "podAntiAffinity" "requiredDuringSchedulingIgnoredDuringExecution" list $role.affinity) -}}
{{- if eq .topologyKey "kubernetes.io/hostname" -}}{{- $apart = true -}}{{- end -}}
{{- end -}}
{{- if not $apart -}}
{{- fail (printf "%s.hostNetwork is true and %s.affinity replaces the chart's own: it needs a required podAntiAffinity with topologyKey kubernetes.io/hostname over kvferry.io/host-network: \"true\", as two pods would want the same ports of their host" $path $path) -}}
{{- end -}}
{{- end -}}
{{- if and $role.hostNetwork $v.networkPolicy.enabled (not $v.networkPolicy.hostNetworkFrom) -}}
{{- fail (printf "%s.hostNetwork is true and networkPolicy.hostNetworkFrom is empty: policies know such pods by their hosts' addresses alone, so name these (ipBlock), or neither Ray's head nor etcd could be reached" $path) -}}
{{- end -}}
{{- if le (float64 $role.memoryGiB) $shm -}}
{{- fail (printf "%s.memoryGiB is %v and /dev/shm of the pod, which counts as its memory, is %v GiB: give it more" $path $role.memoryGiB $shm) -}}
{{- end -}}
{{- end -}}

{{- if ne $v.ray.mode "existing" -}}
{{- if $v.config.pools -}}
{{- fail "config.pools names pools of workers: this chart makes pods for the default pool only, so theirs would never start. Take a Ray cluster that has pods for them, with ray.mode: existing" -}}
{{- end -}}
{{- end -}}
{{- include "kvferry.checkModels" . -}}

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
{{- if $v.model.weights.enabled -}}
{{- if not $servesDefault -}}
{{- fail "model.weights.enabled is true and there is no default model (roles.prefill.replicas and roles.decode.replicas are 0): the volume is filled with config.model.path. Take model.volume" -}}
{{- end -}}
{{- if not (include "kvferry.isHubId" .) -}}
{{- fail (printf "model.weights.enabled is true and config.model.path is %q: the volume is filled with a model of the hub, owner/name, for the engine vllm" $v.config.model.path) -}}
{{- end -}}
{{- if $hasModelVolume -}}
{{- fail "model.weights.enabled is true and model.volume says where the model is: name one of them" -}}
{{- end -}}
{{- $models := list -}}
{{- range prepend $v.model.weights.also (dict "path" $v.config.model.path "revision" (include "kvferry.modelRevision" .)) -}}
{{- if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$" .revision) -}}
{{- fail (printf "model.weights needs a revision of %s (config.model.revision), and it is %q: letters, digits, dots and dashes. Best a commit, as a branch moves and the volume does not" .path .revision) -}}
{{- end -}}
{{- $folder := printf "%s--%s" (.path | replace "/" "--") .revision -}}
{{- if has $folder $models -}}
{{- fail (printf "model.weights would fill %s twice: name each model and revision once" $folder) -}}
{{- end -}}
{{- $models = append $models $folder -}}
{{- end -}}
{{- if $v.networkPolicy.enabled -}}
{{- range $name, $value := $v.model.download.env -}}
{{- $port := regexFind "[0-9]+$" (regexFind "^[a-zA-Z][a-zA-Z0-9+.-]*://[^/]*:[0-9]+" (toString $value)) -}}
{{- if and $port (has (upper $name) (list "HTTPS_PROXY" "HTTP_PROXY" "ALL_PROXY" "HF_ENDPOINT")) (not (has $port ($v.model.weights.egress.ports | toStrings))) -}}
{{- fail (printf "model.download.env.%s is %q and model.weights.egress.ports lacks %s: the job could not reach it" $name (toString $value) $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $servesDefault $hasModelVolume (not (hasPrefix (printf "%s/" (trimSuffix "/" $v.model.volume.mountPath)) (printf "%s/" (trimSuffix "/" $v.config.model.path)))) -}}
{{- fail (printf "config.model.path is %q and model.volume is mounted at %q: the model's folder lies below it" $v.config.model.path $v.model.volume.mountPath) -}}
{{- end -}}
{{- if and $servesDefault (hasPrefix "/" $v.config.model.path) (not $hasModelVolume) (ne (dig "engine" "kind" "vllm" $v.config) "sim") -}}
{{- fail (printf "config.model.path is the folder %q: model.volume must say with claimName or hostPath where it comes from" $v.config.model.path) -}}
{{- end -}}
{{- if and (not $v.model.weights.enabled) $v.model.weights.also -}}
{{- fail "model.weights.also names models and model.weights.enabled is false" -}}
{{- end -}}
{{- if regexMatch "^[A-Za-z][A-Za-z0-9+.-]*://" $v.config.model.path -}}
{{- fail (printf "config.model.path is %q: models are not read from URLs. Name a hub id, or a folder of model.volume" $v.config.model.path) -}}
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
{{- $needed := include "kvferry.gatewayNeedsMiB" . -}}
{{- if and $needed (dig "gateway" "images" dict $v.config) -}}
{{- fail (printf "gateway.resources.limits.memory is %s and config.gateway.images is set: a gateway may take %s MiB with its limits (docs/operator/sizing.md). Give it more, or lower these" $v.gateway.resources.limits.memory $needed) -}}
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
{{- if and $v.model.weights.enabled (or (regexMatch "^/(bin|dev|etc|lib|lib64|opt|proc|root|run|sbin|sys|tmp|usr|var/cache/kvferry)(/|$)" $v.model.weights.mountPath) (contains ".." $v.model.weights.mountPath)) -}}
{{- fail (printf "model.weights.mountPath is %q: the image or its pods have something there; name a folder of its own, such as /weights" $v.model.weights.mountPath) -}}
{{- end -}}
{{- if $v.gateway.inferencePool.enabled -}}
{{- if not $v.gateway.inferencePool.endpointPicker.name -}}
{{- fail "gateway.inferencePool.enabled needs gateway.inferencePool.endpointPicker.name: the service of an endpoint picker, which the chart does not run" -}}
{{- end -}}
{{- if $v.gateway.tls.secretName -}}
{{- fail "gateway.inferencePool.enabled and gateway.tls.secretName: a pool's endpoints are called by plain HTTP. Let the gateway of the Gateway API end TLS" -}}
{{- end -}}
{{- end -}}
{{- if and $v.gateway.tls.certificate.issuerRef.name (or (not $v.gateway.tls.secretName) (not $v.gateway.tls.certificate.dnsNames)) -}}
{{- fail "gateway.tls.certificate needs gateway.tls.secretName, the secret that cert-manager makes, and gateway.tls.certificate.dnsNames, the names that clients call" -}}
{{- end -}}
{{- if and $v.internalTls.certificate.issuerRef.name (not $v.internalTls.secretName) -}}
{{- fail "internalTls.certificate needs internalTls.secretName, the secret that cert-manager makes" -}}
{{- end -}}
{{- if and $v.externalSecrets.secrets (not $v.externalSecrets.store.name) -}}
{{- fail "externalSecrets.secrets needs externalSecrets.store.name: the store that has them" -}}
{{- end -}}
{{- range $path, $certificate := dict "gateway.tls.certificate" $v.gateway.tls.certificate "internalTls.certificate" $v.internalTls.certificate -}}
{{- if $certificate.issuerRef.name -}}
{{- $duration := $certificate.duration | default "2160h" -}}
{{- if and $certificate.renewBefore (ge (trimSuffix "h" $certificate.renewBefore | int64) (trimSuffix "h" $duration | int64)) -}}
{{- fail (printf "%s.renewBefore is %s and its duration %s: cert-manager refuses a certificate that would be renewed before it begins" $path $certificate.renewBefore $duration) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $made := list -}}
{{- if not $v.internalTls.secretName -}}{{- $made = append $made (include "kvferry.internalTlsSecret" .) -}}{{- end -}}
{{- if and $v.monitoring.members.enabled (not $v.monitoring.members.tlsSecret) -}}{{- $made = append $made (include "kvferry.metricsTlsSecret" .) -}}{{- end -}}
{{- if include "kvferry.firstKeySecret" . -}}{{- $made = concat $made (list (include "kvferry.firstKeySecret" .) (include "kvferry.metricsKeySecret" .) (include "kvferry.keysSecret" .)) -}}{{- end -}}
{{- if $v.etcd.enabled -}}{{- $made = concat $made (list (include "kvferry.etcdTlsSecret" .) (include "kvferry.etcdPasswordSecret" .)) -}}{{- end -}}
{{- if $v.gateway.tls.certificate.issuerRef.name -}}{{- $made = append $made $v.gateway.tls.secretName -}}{{- end -}}
{{- if $v.internalTls.certificate.issuerRef.name -}}{{- $made = append $made $v.internalTls.secretName -}}{{- end -}}
{{- range $v.externalSecrets.secrets -}}
{{- $made = append $made .name -}}
{{- end -}}
{{- range $made -}}
{{- $each := . -}}
{{- $number := 0 -}}
{{- range $made -}}{{- if eq . $each -}}{{- $number = add1 $number -}}{{- end -}}{{- end -}}
{{- if gt (int $number) 1 -}}
{{- fail (printf "secret %q is made twice, by two of externalSecrets.secrets, gateway.tls, internalTls and the chart itself" $each) -}}
{{- end -}}
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
{{- if and $v.networkPolicy.hostNetworkFrom (not (include "kvferry.hasHostNetwork" .)) -}}
{{- fail "networkPolicy.hostNetworkFrom is for roles with hostNetwork: true; other pods are known by their labels" -}}
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
{{- if and $v.monitoring.members.enabled $v.networkPolicy.enabled (not $v.networkPolicy.monitoringNamespace) -}}
{{- fail "monitoring.members.enabled needs networkPolicy.monitoringNamespace, the namespace that Prometheus runs in: policies would keep it from gateways, workers and keepers" -}}
{{- end -}}
{{- if and $scraped $v.gateway.tls.requireClientCertificates -}}
{{- fail "monitoring cannot ask gateways that require client certificates" -}}
{{- end -}}
{{- if and $scraped $v.gateway.tls.secretName (not (include "kvferry.gatewayServerName" .)) -}}
{{- fail "monitoring needs monitoring.gatewayTls.serverName, a name in the certificate of gateway.tls: Prometheus calls pods and the service, which that does not name, and sends them its key" -}}
{{- end -}}
{{- if and $v.monitoring.members.tlsSecret (eq $v.monitoring.members.tlsSecret (include "kvferry.internalTlsSecret" .)) -}}
{{- fail "monitoring.members.tlsSecret is the secret of internalTls: who has its certificate is a gateway, worker or keeper. Name one of another authority" -}}
{{- end -}}

{{- $sections := dict "roles.prefill" $v.roles.prefill "roles.decode" $v.roles.decode -}}
{{- range include "kvferry.groups" . | fromJsonArray -}}{{- $_ := set $sections .path .role -}}{{- end -}}
{{- range $path, $section := merge $sections (dict "gateway" $v.gateway "ray.head" $v.ray.head "rollout" $v.rollout "etcd" $v.etcd) -}}
{{- include "kvferry.checkNames" (dict "path" (printf "%s.extraVolumes" $path) "items" $section.extraVolumes "own" (include "kvferry.ownVolumes" $ | fromJsonArray)) -}}
{{- include "kvferry.checkNames" (dict "path" (printf "%s.extraContainers and extraInitContainers" $path) "items" (concat $section.extraInitContainers $section.extraContainers) "own" (include "kvferry.ownContainers" $ | fromJsonArray)) -}}
{{- include "kvferry.checkNames" (dict "path" (printf "%s.env and extraEnv" $path) "items" $section.extraEnv "own" (keys ($section.env | default dict))) -}}
{{- $mounted := list "/tmp" "/dev/shm" "/var/cache/kvferry" -}}
{{- if $hasModelVolume -}}{{- $mounted = append $mounted (trimSuffix "/" $v.model.volume.mountPath) -}}{{- end -}}
{{- if $v.model.weights.enabled -}}{{- $mounted = append $mounted (trimSuffix "/" $v.model.weights.mountPath) -}}{{- end -}}
{{- range $section.extraVolumeMounts -}}
{{- $at := trimSuffix "/" .mountPath -}}
{{- if or (has $at $mounted) (regexMatch "^/etc/kvferry(/|$)" $at) -}}
{{- fail (printf "%s.extraVolumeMounts has something at %q twice, or where the chart mounts its own" $path .mountPath) -}}
{{- end -}}
{{- $mounted = append $mounted $at -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What holds for entries of config.models, and for their pods in roles.models. */}}
{{- define "kvferry.checkModels" -}}
{{- $v := .Values -}}
{{- $isVllm := eq (dig "engine" "kind" "vllm" $v.config) "vllm" -}}
{{- $isOwnRay := eq $v.ray.mode "rayservice" -}}
{{- $servesDefault := include "kvferry.servesDefault" . -}}
{{- $hasVolume := or $v.model.volume.claimName $v.model.volume.hostPath -}}
{{- $mount := trimSuffix "/" $v.model.volume.mountPath -}}
{{- $known := list -}}
{{- $asked := dict -}}
{{- $shares := dict -}}
{{- $owners := dict "config.model" "default" -}}
{{- if $servesDefault -}}
{{- $_ := set $asked (dig "model" "served_name" "" $v.config | default (base $v.config.model.path)) "config.model" -}}
{{- range dig "model" "aliases" list $v.config -}}{{- $_ := set $asked . "config.model.aliases" -}}{{- end -}}
{{- $_ := set $shares "config.model" (dig "model" "canary" dict $v.config) -}}
{{- end -}}
{{- include "kvferry.checkTemplate" (dict "path" "config.model" "model" $v.config.model) -}}
{{- if $servesDefault -}}{{- include "kvferry.checkDraft" (dict "root" $ "entry" "") -}}{{- end -}}
{{- $num := add (len ($v.config.models | default list)) (len ($v.config.pools | default dict)) -}}
{{- if gt $num 16 -}}
{{- fail (printf "config.models and config.pools have %d entries in all: 16 is the limit" $num) -}}
{{- end -}}
{{- range $index, $entry := $v.config.models -}}
{{- $here := printf "config.models[%d]" $index -}}
{{- if or (not (regexMatch "^[a-z0-9]([-a-z0-9]{0,29}[a-z0-9])?$" $entry.name)) (has $entry.name (list "default" "other")) -}}
{{- fail (printf "%s.name is %q: groups of pods are called after it, so small letters, digits and dashes within, at most 31, and not default or other" $here $entry.name) -}}
{{- end -}}
{{- if has $entry.name $known -}}
{{- fail (printf "%s.name is %q, the name of an entry before it" $here $entry.name) -}}
{{- end -}}
{{- $known = append $known $entry.name -}}
{{- range prepend (dig "model" "aliases" list $entry) (dig "model" "served_name" "" $entry | default $entry.name) -}}
{{- if hasKey $asked . -}}
{{- fail (printf "%s.model would be asked for as %q, as is %s: each name leads to one model (served_name, aliases)" $here . (get $asked .)) -}}
{{- end -}}
{{- $_ := set $asked . $here -}}
{{- end -}}
{{- $_ := set $shares (printf "%s.model" $here) (dig "model" "canary" dict $entry) -}}
{{- $_ := set $owners (printf "%s.model" $here) $entry.name -}}
{{- $path := dig "model" "path" "" $entry -}}
{{- if and $isVllm $v.model.weights.enabled (not (include "kvferry.weightsAt" (dict "root" $ "folder" $path))) -}}
{{- fail (printf "%s.model.path is %q: with model.weights it is the folder of a model that the volume is filled with, %s, of model.weights.also" $here $path (include "kvferry.weightsFolder" (dict "root" $ "path" "OWNER/NAME" "revision" "REVISION"))) -}}
{{- end -}}
{{- if and $isVllm (not $v.model.weights.enabled) (not (hasPrefix (printf "%s/" $mount) $path)) -}}
{{- fail (printf "%s.model.path is %q: gateways and workers read each model below model.volume.mountPath, %s" $here $path $mount) -}}
{{- end -}}
{{- if and $isVllm (not $v.model.weights.enabled) (not $hasVolume) -}}
{{- fail (printf "%s.model.path is the folder %q: model.volume must say with claimName or hostPath where it comes from" $here $path) -}}
{{- end -}}
{{- include "kvferry.checkTemplate" (dict "path" (printf "%s.model" $here) "model" ($entry.model | default dict)) -}}
{{- include "kvferry.checkDraft" (dict "root" $ "entry" $entry.name) -}}
{{- range $kind := list "prefill" "decode" -}}
{{- if and $isOwnRay (hasKey $entry $kind) -}}
{{- fail (printf "%s.%s is for ray.mode: existing; of the pods that this chart makes say it in roles.models.%s.%s" $here $kind $entry.name $kind) -}}
{{- end -}}
{{- end -}}
{{- if and $isOwnRay (eq (int (include "kvferry.role" (dict "root" $ "kind" "decode" "entry" $entry.name) | fromJson).replicas) 0) -}}
{{- fail (printf "roles.models.%s.decode.replicas is 0: decode workers answer, so a model needs one. Or remove its entry from config.models" $entry.name) -}}
{{- end -}}
{{- end -}}
{{- range $path, $canary := $shares -}}
{{- $sum := 0.0 -}}
{{- range $name, $percent := $canary -}}
{{- if eq $name (get $owners $path) -}}
{{- fail (printf "%s.canary names the model itself: what is left of 100 per cent is its own" $path) -}}
{{- end -}}
{{- $sum = addf $sum (float64 $percent) -}}
{{- if gt $sum 100.0 -}}
{{- fail (printf "%s.canary: the shares are over 100 per cent in all" $path) -}}
{{- end -}}
{{- if not (or (has $name $known) (and $servesDefault (eq $name "default"))) -}}
{{- fail (printf "%s.canary names %q, which is no entry of config.models" $path $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $v.roles.models -}}
{{- if not $isOwnRay -}}
{{- fail (printf "roles.models.%s is for ray.mode: rayservice: the pods of a Ray that is there are not this chart's. Counts stand in config.models" $name) -}}
{{- end -}}
{{- if not (has $name $known) -}}
{{- fail (printf "roles.models.%s: there is no such entry of config.models (%s)" $name ($known | join ", " | default "none")) -}}
{{- end -}}
{{- end -}}
{{- $sharing := ternary (list "default") list (ne $servesDefault "") -}}
{{- range $v.config.models -}}
{{- if not (eq (dig "tier" "enabled" true .) false) -}}{{- $sharing = append $sharing .name -}}{{- end -}}
{{- end -}}
{{- if and $isVllm $v.tier.volumes (gt (len $sharing) 1) (not (dig "tier" "blocks_per_chunk" 0 $v.config)) -}}
{{- fail (printf "config.tier.blocks_per_chunk must be set where models share tier.volumes (%s): gateways know one size of chunks per volume. Or say tier: {enabled: false} in entries" (join ", " $sharing)) -}}
{{- end -}}
{{- end -}}

{{/* Fails for a draft model that workers do not find: their pods download nothing. {root, entry: its name, or empty}. */}}
{{- define "kvferry.checkDraft" -}}
{{- $v := .root.Values -}}
{{- $found := include "kvferry.draft" . -}}
{{- if and $found (eq (dig "engine" "kind" "vllm" $v.config) "vllm") -}}
{{- $draft := fromJson $found -}}
{{- $mount := trimSuffix "/" $v.model.volume.mountPath -}}
{{- if not $draft.folder -}}
{{- fail (printf "%s.model is missing: the folder of the draft model or EAGLE head" $draft.key) -}}
{{- else if eq $v.ray.mode "existing" -}}
{{- if not (hasPrefix "/" $draft.folder) -}}
{{- fail (printf "%s.model is %q and ray.mode is existing: nothing downloads a model to that Ray's nodes. Name the folder that all of them have" $draft.key $draft.folder) -}}
{{- end -}}
{{- else if $v.model.weights.enabled -}}
{{- if not (include "kvferry.weightsAt" (dict "root" .root "folder" $draft.folder)) -}}
{{- fail (printf "%s.model is %q: with model.weights it is the folder of a model that the volume is filled with, %s, of model.weights.also" $draft.key $draft.folder (include "kvferry.weightsFolder" (dict "root" .root "path" "OWNER/NAME" "revision" "REVISION"))) -}}
{{- end -}}
{{- else if not (and (hasPrefix (printf "%s/" $mount) $draft.folder) (or $v.model.volume.claimName $v.model.volume.hostPath)) -}}
{{- fail (printf "%s.model is %q: workers download no draft model. Name its folder below model.volume.mountPath, %s, or fill one with model.weights.also" $draft.key $draft.folder $mount) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails for a chat template that pods would look for in their working folder: {path, model}. */}}
{{- define "kvferry.checkTemplate" -}}
{{- $file := .model.chat_template | default "" | toString -}}
{{- if and $file (not (hasPrefix "/" $file)) -}}
{{- fail (printf "%s.chat_template is %q: name an absolute path, below a volume that gateways mount (model.volume, gateway.extraVolumes)" .path $file) -}}
{{- end -}}
{{- end -}}

{{/* Names of the chart's volumes and containers, in whichever pod, and of those that KubeRay adds. As JSON. */}}
{{- define "kvferry.ownVolumes" -}}
{{- $names := list "cache" "config" "data" "etcd" "etcd-root" "first-key" "gateway-tls" "internal-tls" "keys" "metrics-tls" "model" "ray-logs" "shared-mem" "shm" "tier-keys" "tls" "tmp" -}}
{{- range .Values.tier.volumes -}}{{- $names = append $names (printf "volume-%s" .name) -}}{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{- define "kvferry.ownContainers" -}}
{{- list "ask" "etcd" "fill" "gateway" "memlock" "model" "ray-head" "ray-worker" "rollout" "submit" "users" "wait-gcs-ready" "weights" "weights-draft" | toJson -}}
{{- end -}}

{{/* Fails where a name is there twice, or is one of the chart's own: {path, items, own}. */}}
{{- define "kvferry.checkNames" -}}
{{- $names := .own -}}
{{- range .items -}}
{{- if has .name $names -}}
{{- fail (printf "%s name %q twice, or as the chart names its own" $.path .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
