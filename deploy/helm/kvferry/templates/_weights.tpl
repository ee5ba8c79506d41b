{{/* The volume of weights, which a job fills and all members mount read-only. */}}
{{- define "kvferry.weightsClaim" -}}
{{- if .Values.model.weights.enabled -}}
{{- default (printf "%s-weights" (include "kvferry.fullname" .)) .Values.model.weights.claim.existing -}}
{{- end -}}
{{- end -}}

{{/* The folder of a model at a revision: {root, path, revision}. Another model or revision has a folder of its own. */}}
{{- define "kvferry.weightsFolder" -}}
{{ trimSuffix "/" .root.Values.model.weights.mountPath }}/{{ .path | replace "/" "--" }}--{{ .revision }}
{{- end -}}

{{- define "kvferry.modelRevision" -}}
{{ dig "model" "revision" "" .Values.config }}
{{- end -}}

{{/* Arguments of python -m kvferry.hub_model: {root, command, path, revision}. As JSON. */}}
{{- define "kvferry.weightsCommand" -}}
{{ list "python" "-m" "kvferry.hub_model" .command "--model" .path "--revision" .revision "--folder" (include "kvferry.weightsFolder" .) | toJson }}
{{- end -}}

{{/* How the hub is reached, with the token from its secret. */}}
{{- define "kvferry.hubEnv" -}}
{{- include "kvferry.env" .Values.model.download.env }}
{{- with .Values.model.hubToken }}
{{- if .secretName }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The model of the weights' volume that an entry of config.models has: {root, entry: its name}. As JSON; empty: none. */}}
{{- define "kvferry.entryWeights" -}}
{{- $root := .root -}}
{{- $name := .entry -}}
{{- range $entry := .root.Values.config.models -}}
{{- if eq $entry.name $name -}}
{{- with include "kvferry.weightsAt" (dict "root" $root "folder" (dig "model" "path" "" $entry)) }}{{ . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The model that a folder of the weights' volume holds: {root, folder}. As JSON; empty: none. */}}
{{- define "kvferry.weightsAt" -}}
{{- $root := .root -}}
{{- $folder := trimSuffix "/" .folder -}}
{{- if $root.Values.model.weights.enabled -}}
{{- range $model := prepend $root.Values.model.weights.also (dict "path" $root.Values.config.model.path "revision" (include "kvferry.modelRevision" $root)) -}}
{{- if eq $folder (include "kvferry.weightsFolder" (merge (dict "root" $root) $model)) -}}{{- toJson $model -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The draft model of a model's engines: {root, entry: its name, or empty}. As JSON, {key, folder}; empty: none. */}}
{{- define "kvferry.draft" -}}
{{- $key := "config.engine.args.speculative_config" -}}
{{- $speculation := (dig "engine" "args" dict .root.Values.config | default dict).speculative_config -}}
{{- $name := .entry -}}
{{- range $index, $entry := .root.Values.config.models -}}
{{- $own := dig "engine" "args" dict $entry | default dict -}}
{{- if and (eq $entry.name $name) (hasKey $own "speculative_config") -}}
{{- $key = printf "config.models[%d].engine.args.speculative_config" $index -}}
{{- $speculation = $own.speculative_config -}}
{{- end -}}
{{- end -}}
{{- if kindIs "map" $speculation -}}
{{- $method := toString $speculation.method -}}
{{- $hasModel := or $speculation.model (has $method (list "draft_model" "eagle" "eagle3")) -}}
{{- if and $hasModel (not (has $method (list "ngram" "ngram_gpu" "suffix" "custom_class" "extract_hidden_states"))) -}}
{{- dict "key" $key "folder" ($speculation.model | default "" | toString) | toJson -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Waits until the weights' volume holds the draft model: {root, entry: its name, or empty}. */}}
{{- define "kvferry.draftInit" -}}
{{- $root := .root -}}
{{- with include "kvferry.draft" . -}}
{{- with include "kvferry.weightsAt" (dict "root" $root "folder" (fromJson .).folder) -}}
{{- include "kvferry.weightsInit" (merge (dict "root" $root "name" "weights-draft") (fromJson .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Waits until the volume holds a model: {root, path, revision, name: of the container, by default weights}. */}}
{{- define "kvferry.weightsInit" -}}
{{- $model := . -}}
{{- with .root -}}
- name: {{ $model.name | default "weights" }}
  image: {{ include "kvferry.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: {{ include "kvferry.weightsCommand" (merge (dict "command" "wait") $model) }}
  env:
    - {name: HOME, value: /tmp}
  resources:
    requests: {cpu: 10m, memory: 64Mi}
    limits: {memory: 256Mi}
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: model, mountPath: {{ .Values.model.weights.mountPath | quote }}, readOnly: true}
{{- end -}}
{{- end -}}

{{/* Template of the pod that fills the volume with one model: {root, path, revision}. */}}
{{- define "kvferry.weightsPod" -}}
{{- $weights := .root.Values.model.weights -}}
metadata:
  labels:
    {{- include "kvferry.labels" .root | nindent 4 }}
    kvferry.io/component: weights
    {{- include "kvferry.extraList" $weights.podLabels | nindent 4 }}
  {{- with $weights.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # Each try is a pod, whose log stays.
  restartPolicy: Never
  serviceAccountName: {{ include "kvferry.serviceAccount" .root }}
  automountServiceAccountToken: false
  {{- include "kvferry.pullSecrets" .root | nindent 2 }}
  securityContext:
    {{- include "kvferry.podSecurity" .root | nindent 4 }}
  {{- with $weights.schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- with $weights.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  containers:
    - name: fill
      image: {{ include "kvferry.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: {{ include "kvferry.weightsCommand" (merge (dict "command" "fill") .) }}
      env:
        - {name: HOME, value: /tmp}
        - {name: HF_HOME, value: /tmp/hub}
        - {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
        {{- include "kvferry.hubEnv" .root | nindent 8 }}
      resources:
        {{- toYaml .root.Values.model.download.resources | nindent 8 }}
      securityContext:
        {{- include "kvferry.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: model, mountPath: {{ $weights.mountPath | quote }}}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: model
      persistentVolumeClaim: {claimName: {{ include "kvferry.weightsClaim" .root | quote }}}
  {{- with $weights.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $weights.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $weights.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Mebibytes of a quantity that Kubernetes wrote, rounded down. */}}
{{- define "kvferry.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" (toString .) | int64 -}}
{{- $unit := regexReplaceAll "^[0-9]+" (toString .) "" -}}
{{- $factor := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 "Pi" 1073741824 -}}
{{- if hasKey $factor $unit -}}
{{ mul $number (get $factor $unit) }}
{{- else -}}
0
{{- end -}}
{{- end -}}
