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

{{- define "kvferry.isHubId" -}}
{{- if and (not (hasPrefix "/" .Values.config.model.path)) (eq (dig "engine" "kind" "vllm" .Values.config) "vllm") -}}
true
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

{{/* Pods of a role: {root, role}. */}}
{{- define "kvferry.numPods" -}}
{{- $role := index .root.Values.roles .role -}}
{{- div (sub (add (int $role.replicas) (int $role.workersPerPod)) 1) (int $role.workersPerPod) -}}
{{- end -}}

{{/* /dev/shm of a worker pod, in GiB: {root, role}. */}}
{{- define "kvferry.shmGiB" -}}
{{- $role := index .root.Values.roles .role -}}
{{- $tier := .root.Values.tier -}}
{{- if $tier.shmGiB -}}
{{- $tier.shmGiB -}}
{{- else if $tier.enabled -}}
{{- add1 (ceil (mulf $role.workersPerPod $tier.cpuGiB)) -}}
{{- else -}}
1
{{- end -}}
{{- end -}}

{{- define "kvferry.hasHostPath" -}}
{{- range .Values.tier.volumes }}{{ if .hostPath }}true{{ end }}{{ end -}}
{{- end -}}

{{/* Whether pods of a role run on their hosts' network. */}}
{{- define "kvferry.hasHostNetwork" -}}
{{- range $name := list "prefill" "decode" -}}
{{- $role := index $.Values.roles $name -}}
{{- if and $role.hostNetwork (gt (int $role.replicas) 0) (eq $.Values.ray.mode "rayservice") -}}true{{- end -}}
{{- end -}}
{{- end -}}
