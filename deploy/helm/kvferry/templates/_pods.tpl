{{/* What every pod of ours has in common. */}}
{{- define "kvferry.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.securityContext.runAsUser }}
runAsGroup: {{ .Values.securityContext.runAsGroup }}
fsGroup: {{ .Values.securityContext.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvferry.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Writable places of a read-only root. */}}
{{- define "kvferry.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/kvferry}
{{- end -}}

{{- define "kvferry.scratchVolumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  emptyDir:
    sizeLimit: {{ include "kvferry.gib" .Values.model.cache.sizeGiB }}
{{- end -}}

{{- define "kvferry.scratchEnv" -}}
- {name: HOME, value: /var/cache/kvferry/home}
- {name: XDG_CACHE_HOME, value: /var/cache/kvferry}
- {name: HF_HOME, value: /var/cache/kvferry/hub}
- {name: VLLM_CACHE_ROOT, value: /var/cache/kvferry/vllm}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
- {name: DO_NOT_TRACK, value: "1"}
- {name: HF_HUB_OFFLINE, value: "1"}
- name: KVFERRY_NODE_ADDRESS
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: KVFERRY_NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: KVFERRY_POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
{{- end -}}

{{/* An empty value is left out, as the operator would write it back. */}}
{{- define "kvferry.env" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}{{ if ne (toString $value) "" }}, value: {{ $value | toString | quote }}{{ end }}}
{{- end }}
{{- end -}}

{{/*
Quantities as Kubernetes writes them back: strings with the largest unit that divides them.
Gibibytes, a number: 0.5 is 512Mi, 2048 is 2Ti. Below one mebibyte is rounded up.
*/}}
{{- define "kvferry.gib" -}}
{{- $mib := ceil (mulf . 1024) | int64 -}}
{{- if eq (mod $mib 1048576) 0 -}}
{{ div $mib 1048576 }}Ti
{{- else if eq (mod $mib 1024) 0 -}}
{{ div $mib 1024 }}Gi
{{- else -}}
{{ $mib }}Mi
{{- end -}}
{{- end -}}

{{/* CPUs, a number: 0.5 is 500m. Quoted. */}}
{{- define "kvferry.cpus" -}}
{{- $milli := ceil (mulf . 1000) | int64 -}}
{{- if eq (mod $milli 1000) 0 -}}
{{ div $milli 1000 | toString | quote }}
{{- else -}}
{{ printf "%dm" $milli | quote }}
{{- end -}}
{{- end -}}

{{/* Fails unless a quantity of the values is as Kubernetes writes it back: {value, path}. */}}
{{- define "kvferry.checkQuantity" -}}
{{- $text := toString .value -}}
{{- $number := regexFind "^[0-9]+" $text | default "1" | int64 -}}
{{- $unit := regexReplaceAll "^[0-9]+" $text "" -}}
{{- $base := ternary 1024 1000 (hasSuffix "i" $unit) -}}
{{- if or (not (regexMatch "^(0|[1-9][0-9]*(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?)$" $text)) (and (gt $number 0) (ne $unit "") (eq (mod $number $base) 0)) -}}
{{- fail (printf "%s is %q: write it with the largest unit that divides it, as in 500m, 2, 1536Mi or 2Gi. Kubernetes stores it so, and Helm 4 takes another spelling for a conflict" .path $text) -}}
{{- end -}}
{{- end -}}

{{/*
What the values add to a component's pods: {root, section, component}. Written as Kubernetes writes it back: each
container has resources, and no variable an empty value.
*/}}
{{- define "kvferry.podExtras" -}}
{{- with .section.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .section.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .section.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .section.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- $labels := merge (include "kvferry.selector" .root | fromYaml) (dict "kvferry.io/component" .component) }}
  {{- range .section.topologySpreadConstraints }}
  - {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A list of containers of the values. */}}
{{- define "kvferry.extraContainers" -}}
{{- range . }}
- {{- toYaml (merge (deepCopy .) (dict "resources" dict)) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A list of variables of the values. */}}
{{- define "kvferry.extraEnv" -}}
{{- range . }}
{{- if and (hasKey . "value") (eq (toString .value) "") }}
- {name: {{ .name }}}
{{- else }}
- {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvferry.extraList" -}}
{{- with . }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Secrets of members: gateways and workers alike. */}}
{{- define "kvferry.memberMounts" -}}
- {name: internal-tls, mountPath: /etc/kvferry/tls/internal, readOnly: true}
{{- if include "kvferry.metricsTlsSecret" . }}
- {name: metrics-tls, mountPath: /etc/kvferry/tls/metrics, readOnly: true}
{{- end }}
{{- if include "kvferry.hasEtcdSecrets" . }}
- {name: etcd, mountPath: /etc/kvferry/etcd, readOnly: true}
{{- end }}
{{- if .Values.model.weights.enabled }}
- {name: model, mountPath: {{ .Values.model.weights.mountPath }}, readOnly: true}
{{- else if or .Values.model.volume.claimName .Values.model.volume.hostPath }}
- {name: model, mountPath: {{ .Values.model.volume.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvferry.hasEtcdSecrets" -}}
{{- if or (include "kvferry.etcdTlsSecret" .) (include "kvferry.etcdPasswordSecret" .) -}}true{{- end -}}
{{- end -}}

{{- define "kvferry.memberVolumes" -}}
- name: internal-tls
  secret: {secretName: {{ include "kvferry.internalTlsSecret" . }}, defaultMode: 0440}
{{- with include "kvferry.metricsTlsSecret" . }}
# The authority alone: only Prometheus has the certificate.
- name: metrics-tls
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- include "kvferry.etcdVolume" . }}
{{- with include "kvferry.weightsClaim" . }}
- name: model
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- with .Values.model.volume }}
{{- if .claimName }}
- name: model
  persistentVolumeClaim: {claimName: {{ .claimName }}, readOnly: true}
{{- else if .hostPath }}
- name: model
  hostPath: {path: {{ .hostPath }}, type: Directory}
{{- end }}
{{- end }}
{{- end -}}

{{/* What opens etcd, where that asks for anything. */}}
{{- define "kvferry.etcdVolume" -}}
{{- if include "kvferry.hasEtcdSecrets" . }}
- name: etcd
  projected:
    defaultMode: 0440
    sources:
      {{- with include "kvferry.etcdTlsSecret" . }}
      - secret: {name: {{ . }}}
      {{- end }}
      {{- with include "kvferry.etcdPasswordSecret" . }}
      - secret:
          name: {{ . }}
          items: [{key: password, path: password}]
      {{- end }}
{{- end }}
{{- end -}}

{{/* Secrets of gateways. */}}
{{- define "kvferry.gatewayMounts" -}}
{{- if include "kvferry.keysSecret" . }}
- {name: keys, mountPath: /etc/kvferry/keys, readOnly: true}
{{- end }}
{{- if .Values.gateway.tls.secretName }}
- {name: gateway-tls, mountPath: /etc/kvferry/tls/gateway, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvferry.gatewayVolumes" -}}
{{- with include "kvferry.keysSecret" . }}
- name: keys
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.gateway.tls.secretName }}
- name: gateway-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "kvferry.gatewayPorts" -}}
- {name: http, containerPort: {{ .Values.gateway.httpPort }}}
{{- with .Values.gateway.grpcPort }}
- {name: grpc, containerPort: {{ . }}}
{{- end }}
{{- end -}}

{{/* A client certificate is more than a kubelet has: with those only the listener is looked at. */}}
{{- define "kvferry.gatewayProbe" -}}
{{- if .root.Values.gateway.tls.requireClientCertificates -}}
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ ternary "HTTPS" "HTTP" (not (empty .root.Values.gateway.tls.secretName)) }}}
{{- end -}}
{{- end -}}

{{/*
Downloads a model of the hub, or finds it there: {root, weights, entry: of config.models, or empty}. Gateways need no weights (OTHER_WEIGHT_SUFFIXES and
WEIGHT_SUFFIXES of kvferry/model_folder.py).
*/}}
{{- define "kvferry.modelInit" -}}
{{- $weights := .weights -}}
{{- $entry := .entry -}}
{{- with .root -}}
{{- if $entry }}
{{- with include "kvferry.entryWeights" (dict "root" . "entry" $entry) }}
{{- include "kvferry.weightsInit" (merge (dict "root" $.root) (fromJson .)) }}
{{- end }}
{{- else if .Values.model.weights.enabled }}
{{- include "kvferry.weightsInit" (dict "root" . "path" .Values.config.model.path "revision" (include "kvferry.modelRevision" .)) }}
{{- else if include "kvferry.isHubId" . }}
{{- $revision := dig "model" "revision" "" .Values.config -}}
{{- $command := list "hf" "download" .Values.config.model.path "--local-dir" (include "kvferry.modelFolder" .) -}}
{{- if $revision -}}
{{- $command = concat $command (list "--revision" $revision) -}}
{{- end -}}
{{- if not $weights -}}
{{- range list "*.bin" "*.gguf" "*.h5" "*.msgpack" "*.npz" "*.onnx" "*.pt" "*.pth" "*.safetensors" -}}
{{- $command = concat $command (list "--exclude" .) -}}
{{- end -}}
{{- end -}}
- name: model
  image: {{ include "kvferry.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: {{ toJson $command }}
  env:
    - {name: HOME, value: /var/cache/kvferry/home}
    - {name: HF_HOME, value: /var/cache/kvferry/hub}
    {{- include "kvferry.hubEnv" . | nindent 4 }}
  resources:
    {{- toYaml .Values.model.download.resources | nindent 4 }}
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "kvferry.scratchMounts" . | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Init containers of a gateway's pod. */}}
{{- define "kvferry.gatewayInit" -}}
{{- if or (include "kvferry.isHubId" .) .Values.gateway.extraInitContainers }}
initContainers:
  {{- include "kvferry.modelInit" (dict "root" . "weights" false "entry" "") | nindent 2 }}
  {{- include "kvferry.extraContainers" .Values.gateway.extraInitContainers | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Refuses a node whose container runtime limits locked memory. */}}
{{- define "kvferry.memlockInit" -}}
- name: memlock
  image: {{ include "kvferry.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - |
      limit=$(ulimit -l)
      [ "$limit" = unlimited ] && exit 0
      echo "This node lets a container lock $limit KiB of memory, and RDMA registers all of an engine's pages. Set" >&2
      echo "LimitMEMLOCK=infinity for its container runtime (containerd.service), restart it, and delete this pod." >&2
      exit 1
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
{{- end -}}

{{/* Environment of everything of Ray. */}}
{{- define "kvferry.rayEnv" -}}
# Ray runs workers, and so engines, at nice 15 otherwise.
- {name: RAY_worker_niceness, value: "0"}
# A driver that ends must not start a Ray of its own.
- {name: RAY_ENABLE_AUTO_CONNECT, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- include "kvferry.env" .Values.ray.env }}
{{- end -}}

{{/* How a raylet is looked at: KubeRay's own readiness probe asks Serve's proxy, which there is none of. */}}
{{- define "kvferry.rayletProbe" -}}
httpGet: {path: /api/local_raylet_healthz, port: 52365}
{{- end -}}
