{{- define "kvferry.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvferry.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvferry
{{ include "kvferry.selector" . }}
{{- end -}}

{{/* Own names: KubeRay sets app.kubernetes.io/name and created-by on its pods. */}}
{{- define "kvferry.selector" -}}
kvferry.io/release: {{ include "kvferry.fullname" . }}
{{- end -}}

{{- define "kvferry.image" -}}
{{- $tag := default (printf "%s-%s" .Chart.AppVersion (dig "engine" "device" "cpu" .Values.config)) .Values.image.tag -}}
{{- with .Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}

{{- define "kvferry.etcdImage" -}}
{{- with .Values.etcd.image.registry | default .Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .Values.etcd.image.repository }}:{{ .Values.etcd.image.tag }}
{{- end -}}

{{- define "kvferry.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvferry.serviceAccount" -}}
{{- default (include "kvferry.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "kvferry.keysSecret" -}}
{{- if .Values.auth.keysSecret -}}
{{ .Values.auth.keysSecret }}
{{- else if .Values.auth.generateKey -}}
{{ include "kvferry.fullname" . }}-keys
{{- end -}}
{{- end -}}

{{- define "kvferry.firstKeySecret" -}}
{{- if and .Values.auth.generateKey (not .Values.auth.keysSecret) -}}
{{ include "kvferry.fullname" . }}-first-key
{{- end -}}
{{- end -}}

{{/* With the chart's own key for Prometheus, made with the first key. */}}
{{- define "kvferry.metricsKeySecret" -}}
{{- if include "kvferry.firstKeySecret" . -}}
{{ include "kvferry.fullname" . }}-metrics-key
{{- end -}}
{{- end -}}

{{/* With the certificate that Prometheus shows to metrics listeners, and its authority's; empty: nobody scrapes them. */}}
{{- define "kvferry.metricsTlsSecret" -}}
{{- if .Values.monitoring.members.enabled -}}
{{- default (printf "%s-metrics-tls" (include "kvferry.fullname" .)) .Values.monitoring.members.tlsSecret -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.internalTlsSecret" -}}
{{- default (printf "%s-internal-tls" (include "kvferry.fullname" .)) .Values.internalTls.secretName -}}
{{- end -}}

{{/* The key is there: a secret with what the certificates of etcd are, whoever runs it; empty: no TLS. */}}
{{- define "kvferry.etcdTlsSecret" -}}
{{- if .Values.etcd.enabled -}}
{{ include "kvferry.fullname" . }}-etcd-tls
{{- else -}}
{{ .Values.etcd.external.tlsSecret }}
{{- end -}}
{{- end -}}

{{- define "kvferry.etcdPasswordSecret" -}}
{{- if .Values.etcd.enabled -}}
{{ include "kvferry.fullname" . }}-etcd-users
{{- else -}}
{{ .Values.etcd.external.passwordSecret }}
{{- end -}}
{{- end -}}

{{- define "kvferry.etcdEndpoints" -}}
{{- if .Values.etcd.enabled -}}
{{- $name := printf "%s-etcd" (include "kvferry.fullname" .) -}}
{{- $endpoints := list -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{- $endpoints = append $endpoints (printf "%s-%d.%s.%s.svc:2379" $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{- toJson $endpoints -}}
{{- else -}}
{{- toJson .Values.etcd.endpoints -}}
{{- end -}}
{{- end -}}

{{/* Whether the default model has workers; without, all models are entries of config.models. */}}
{{- define "kvferry.servesDefault" -}}
{{- if gt (add (int .Values.roles.prefill.replicas) (int .Values.roles.decode.replicas)) 0 -}}
true
{{- end -}}
{{- end -}}

{{- define "kvferry.isHubId" -}}
{{- if and (include "kvferry.servesDefault" .) (not (hasPrefix "/" .Values.config.model.path)) (eq (dig "engine" "kind" "vllm" .Values.config) "vllm") -}}
true
{{- end -}}
{{- end -}}

{{/* A name that clients may ask for. */}}
{{- define "kvferry.anyName" -}}
{{- if include "kvferry.servesDefault" . -}}
{{- dig "model" "served_name" "" .Values.config | default (base .Values.config.model.path) -}}
{{- else -}}
{{- with first .Values.config.models }}{{ dig "model" "served_name" "" . | default .name }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The same string on every node. */}}
{{- define "kvferry.modelFolder" -}}
{{- if .Values.model.weights.enabled -}}
{{ include "kvferry.weightsFolder" (dict "root" . "path" .Values.config.model.path "revision" (include "kvferry.modelRevision" .)) }}
{{- else if include "kvferry.isHubId" . -}}
/var/cache/kvferry/model
{{- else -}}
{{ .Values.config.model.path }}
{{- end -}}
{{- end -}}

{{/*
A role of the default model, or of an entry of config.models, whose keys replace those of the default one's; counts and
settings of engines are its own: {root, kind, entry: its name, or empty}. As JSON.
*/}}
{{- define "kvferry.role" -}}
{{- $role := deepCopy (index .root.Values.roles .kind) -}}
{{- if .entry -}}
{{- $_ := set $role "replicas" (ternary 0 1 (and .root.Values.aggregated (eq .kind "prefill"))) -}}
{{- $_ := set $role "engine" dict -}}
{{- range $key, $value := dig .entry .kind dict .root.Values.roles.models -}}
{{- $_ := set $role $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $role -}}
{{- end -}}

{{/*
The groups of workers of this release's Ray, a JSON list: {name, kind: prefill or decode, entry: of config.models, or
empty, path: of its values, role: those, tier and cpuGiB: of its engines}.
*/}}
{{- define "kvferry.groups" -}}
{{- $root := . -}}
{{- $models := list (dict "name" "") -}}
{{- if eq .Values.ray.mode "rayservice" -}}{{- $models = concat $models (.Values.config.models | default list) -}}{{- end -}}
{{- $groups := list -}}
{{- range $model := $models -}}
{{- range $kind := list "prefill" "decode" -}}
{{- $role := include "kvferry.role" (dict "root" $root "kind" $kind "entry" $model.name) | fromJson -}}
{{- if gt (int $role.replicas) 0 -}}
{{- $name := ternary (printf "%s-%s" $kind $model.name) $kind (ne $model.name "") -}}
{{- $path := ternary (printf "roles.models.%s.%s" $model.name $kind) (printf "roles.%s" $kind) (ne $model.name "") -}}
{{- $tier := dig "tier" dict $model -}}
{{- $enabled := ternary $tier.enabled $root.Values.tier.enabled (kindIs "bool" $tier.enabled) -}}
{{- $groups = append $groups (dict "name" $name "kind" $kind "entry" $model.name "path" $path "role" $role "tier" $enabled "cpuGiB" ($tier.cpu_gib | default $root.Values.tier.cpuGiB)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/*
Mebibytes that a gateway of vLLM's models may take, of docs/operator/sizing.md; images count where config.gateway.images
is set. Empty: any, or the limit of its pods is enough.
*/}}
{{- define "kvferry.gatewayNeedsMiB" -}}
{{- $gateway := .Values.config.gateway | default dict -}}
{{- $images := $gateway.images | default dict -}}
{{- $num := add (ternary 1 0 (ne (include "kvferry.servesDefault" .) "")) (len (.Values.config.models | default list)) -}}
{{- $needed := add 811 512 64 (mul $num 356) -}}
{{- if and $images (ne (int (dig "max_per_request" 8 $images)) 0) (include "kvferry.servesDefault" .) -}}
{{- $needed = add $needed 811 (mul ($images.processes | default 2) ($images.memory_mib | default 1024)) ($images.max_pending_mib | default 512) 128 -}}
{{- end -}}
{{- $limit := include "kvferry.mebibytes" (dig "limits" "memory" "" .Values.gateway.resources) | int64 -}}
{{- if and (eq (dig "engine" "kind" "vllm" .Values.config) "vllm") (gt $limit 0) (lt $limit (int64 $needed)) -}}
{{ $needed }}
{{- end -}}
{{- end -}}

{{/* Pods of a group. */}}
{{- define "kvferry.numPods" -}}
{{- $role := .role -}}
{{- div (sub (add (int $role.replicas) (int $role.workersPerPod)) 1) (int $role.workersPerPod) -}}
{{- end -}}

{{/* /dev/shm of a worker pod, in GiB: {root, group}. */}}
{{- define "kvferry.shmGiB" -}}
{{- $tier := .root.Values.tier -}}
{{- if $tier.shmGiB -}}
{{- $tier.shmGiB -}}
{{- else if .group.tier -}}
{{- add1 (ceil (mulf .group.role.workersPerPod .group.cpuGiB)) -}}
{{- else -}}
1
{{- end -}}
{{- end -}}

{{- define "kvferry.hasHostPath" -}}
{{- range .Values.tier.volumes }}{{ if .hostPath }}true{{ end }}{{ end -}}
{{- end -}}

{{/* Whether worker pods run on their hosts' network. */}}
{{- define "kvferry.hasHostNetwork" -}}
{{- range include "kvferry.groups" . | fromJsonArray -}}
{{- if and .role.hostNetwork (eq $.Values.ray.mode "rayservice") -}}true{{- end -}}
{{- end -}}
{{- end -}}
