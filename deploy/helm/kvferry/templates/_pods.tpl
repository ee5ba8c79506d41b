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
    sizeLimit: {{ .Values.model.cache.sizeGiB }}Gi
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
{{- end -}}

{{- define "kvferry.env" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end -}}

{{/* Secrets of members: gateways and workers alike. */}}
{{- define "kvferry.memberMounts" -}}
- {name: internal-tls, mountPath: /etc/kvferry/tls/internal, readOnly: true}
{{- if include "kvferry.hasEtcdSecrets" . }}
- {name: etcd, mountPath: /etc/kvferry/etcd, readOnly: true}
{{- end }}
{{- if or .Values.model.volume.claimName .Values.model.volume.hostPath }}
- {name: model, mountPath: {{ .Values.model.volume.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvferry.hasEtcdSecrets" -}}
{{- if or (include "kvferry.etcdTlsSecret" .) (include "kvferry.etcdPasswordSecret" .) -}}true{{- end -}}
{{- end -}}

{{- define "kvferry.memberVolumes" -}}
- name: internal-tls
  secret: {secretName: {{ include "kvferry.internalTlsSecret" . }}, defaultMode: 0440}
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

{{/* Downloads a model of the hub, or finds it there. */}}
{{- define "kvferry.modelInit" -}}
{{- if include "kvferry.isHubId" . }}
- name: model
  image: {{ include "kvferry.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [hf, download, {{ .Values.config.model.path | quote }}, --local-dir, {{ include "kvferry.modelFolder" . }}]
  env:
    - {name: HOME, value: /var/cache/kvferry/home}
    - {name: HF_HOME, value: /var/cache/kvferry/hub}
    {{- with .Values.model.hubToken }}
    {{- if .secretName }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .key }}}}
    {{- end }}
    {{- end }}
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "kvferry.scratchMounts" . | nindent 4 }}
{{- end }}
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
