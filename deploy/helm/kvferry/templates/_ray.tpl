{{/* Labels by which a gang scheduler takes a cluster's pods for one. */}}
{{- define "kvferry.gangLabels" -}}
{{- $scheduler := .Values.ray.gang.scheduler -}}
{{- $queue := .Values.ray.gang.queue -}}
{{- if eq $scheduler "volcano" }}
ray.io/scheduler-name: volcano
{{- with $queue }}
volcano.sh/queue-name: {{ . | quote }}
{{- end }}
{{- else if eq $scheduler "yunikorn" }}
ray.io/gang-scheduling-enabled: "true"
yunikorn.apache.org/app-id: {{ include "kvferry.fullname" . }}
{{- with $queue }}
yunikorn.apache.org/queue: {{ . | quote }}
{{- end }}
{{- else if eq $scheduler "kai" }}
kai.scheduler/queue: {{ $queue | default "default" | quote }}
{{- else if eq $scheduler "scheduler-plugins" }}
ray.io/gang-scheduling-enabled: "true"
{{- end }}
{{- end -}}

{{/* How long Ray waits for replicas on a node that goes: their own limit, and time to say so. In seconds. */}}
{{- define "kvferry.workerDrainSeconds" -}}
{{ add (ceil (dig "worker" "drain_timeout_s" 120 .Values.config) | int) 30 }}
{{- end -}}

{{- define "kvferry.gatewayDrainSeconds" -}}
{{ add (ceil (dig "gateway" "drain_timeout_s" 30 .Values.config) | int) (int .Values.gateway.lingerSeconds) 10 }}
{{- end -}}

{{/*
Replicas of a worker group: {numPods}. All three are the count, so that a gang is the whole cluster. scaleStrategy is
written out because the operator writes it back: workerGroupSpecs is an atomic list, and what differs from the
rendering makes the operator its owner, with which Helm 4 conflicts.
*/}}
{{- define "kvferry.groupCounts" -}}
replicas: {{ .numPods }}
minReplicas: {{ .numPods }}
maxReplicas: {{ .numPods }}
scaleStrategy: {}
{{- end -}}

{{/* What a worker pod requests and is limited to alike: {role, gpus}. */}}
{{- define "kvferry.workerLimits" -}}
memory: {{ include "kvferry.gib" .role.memoryGiB }}
{{- if .gpus }}
nvidia.com/gpu: {{ .gpus | toString | quote }}
{{- end }}
{{- range $name, $value := .role.extraResources }}
{{ $name }}: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{/*
Annotations of a pod of Ray: {root, spec, section, more: what else a pod is made of}. The digest says whether a pod is of the present template, for
kvferry-rollout; labels with versions are no reason to start an engine again.
*/}}
{{- define "kvferry.podAnnotations" -}}
{{- $own := .section.podAnnotations | default dict -}}
{{- $labels := .section.podLabels | default dict -}}
kvferry.io/template: {{ list (fromYaml .spec) $own $labels .root.Values.rollout.restartedAt (.more | default dict) | toJson | sha256sum }}
{{- with .root.Values.rollout.restartedAt }}
kvferry.io/restarted-at: {{ . | quote }}
{{- end }}
{{- with $own }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* One worker group: {root, group}. */}}
{{- define "kvferry.workerGroup" -}}
{{- $root := .root -}}
{{- $name := .group.name -}}
{{- $role := .group.role -}}
{{- $gpus := mul (int $role.gpusPerWorker) (int $role.workersPerPod) -}}
{{- $cpus := mulf $role.cpusPerWorker $role.workersPerPod -}}
{{- $numPods := include "kvferry.numPods" .group | int -}}
{{- $spec := include "kvferry.workerPodSpec" . -}}
- groupName: {{ $name }}
  {{- include "kvferry.groupCounts" (dict "numPods" $numPods) | nindent 2 }}
  # A worker takes one, so Serve puts this group's workers here and nowhere else.
  resources: {kvferry_{{ $name }}: "{{ int $role.workersPerPod }}", CPU: "{{ $cpus }}"{{ if $gpus }}, GPU: "{{ $gpus }}"{{ end }}}
  rayStartParams:
    object-store-memory: "134217728"
  template:
    metadata:
      labels:
        {{- include "kvferry.labels" $root | nindent 8 }}
        kvferry.io/component: {{ $name }}
        kvferry.io/ray: "true"
        {{- if $role.hostNetwork }}
        kvferry.io/host-network: "true"
        {{- end }}
        {{- include "kvferry.extraList" $role.podLabels | nindent 8 }}
      annotations:
        {{- include "kvferry.podAnnotations" (dict "root" $root "spec" $spec "section" $role "more" (dict "workers" (int $role.workersPerPod) "cpus" $cpus "gpus" $gpus)) | nindent 8 }}
    spec:
      {{- $spec | nindent 6 }}
{{- end -}}

{{/* Pods of a worker group: {root, group}. */}}
{{- define "kvferry.workerPodSpec" -}}
{{- $root := .root -}}
{{- $name := .group.name -}}
{{- $role := .group.role -}}
{{- $volumes := ternary $root.Values.tier.volumes list .group.tier -}}
{{- $modelInit := include "kvferry.modelInit" (dict "root" $root "weights" true "entry" .group.entry) -}}
{{- $draftInit := include "kvferry.draftInit" (dict "root" $root "entry" .group.entry) -}}
{{- $gpus := mul (int $role.gpusPerWorker) (int $role.workersPerPod) -}}
{{- $cpus := mulf $role.cpusPerWorker $role.workersPerPod -}}
# A worker that goes finishes its requests first.
terminationGracePeriodSeconds: {{ add (include "kvferry.workerDrainSeconds" $root | int) 30 }}
automountServiceAccountToken: false
{{- include "kvferry.pullSecrets" $root | nindent 0 }}
{{- with $role.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if $role.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with $role.dnsPolicy | default (ternary "ClusterFirstWithHostNet" "" $role.hostNetwork) }}
dnsPolicy: {{ . }}
{{- end }}
{{- include "kvferry.podExtras" (dict "root" $root "section" $role "component" $name) }}
securityContext:
  {{- include "kvferry.podSecurity" $root | nindent 2 }}
{{- if or $role.rdma $modelInit $draftInit $role.extraInitContainers }}
initContainers:
  {{- if $role.rdma }}
  {{- include "kvferry.memlockInit" $root | nindent 2 }}
  {{- end }}
  {{- $modelInit | nindent 2 }}
  {{- with $draftInit }}{{ . | nindent 2 }}{{ end }}
  {{- include "kvferry.extraContainers" $role.extraInitContainers | nindent 2 }}
{{- end }}
containers:
  - name: ray-worker
    image: {{ include "kvferry.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    env:
      {{- include "kvferry.scratchEnv" $root | nindent 6 }}
      {{- include "kvferry.rayEnv" $root | nindent 6 }}
      # How long Ray lets a node that is told to go drain; it is killed at the end of the grace period.
      - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ include "kvferry.workerDrainSeconds" $root | quote }}}
      {{- include "kvferry.env" $role.env | nindent 6 }}
      {{- include "kvferry.extraEnv" $role.extraEnv | nindent 6 }}
    {{- if $role.hostNetwork }}
    ports:
      # Port of Ray's agent, the same in each Ray node: so no two Ray nodes of any release share a host.
      - {name: ray-agent, containerPort: 52365, hostPort: 52365}
    {{- end }}
    startupProbe:
      {{- include "kvferry.rayletProbe" . | nindent 6 }}
      periodSeconds: 5
      failureThreshold: 60
    readinessProbe:
      {{- include "kvferry.rayletProbe" . | nindent 6 }}
      periodSeconds: 5
      timeoutSeconds: 5
    livenessProbe:
      {{- include "kvferry.rayletProbe" . | nindent 6 }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 12
    resources:
      {{- with $role.containerClaims }}
      claims:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      requests:
        cpu: {{ include "kvferry.cpus" $cpus }}
        {{- include "kvferry.workerLimits" (dict "role" $role "gpus" $gpus) | nindent 8 }}
      limits:
        {{- include "kvferry.workerLimits" (dict "role" $role "gpus" $gpus) | nindent 8 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    volumeMounts:
      {{- include "kvferry.scratchMounts" $root | nindent 6 }}
      {{- include "kvferry.memberMounts" $root | nindent 6 }}
      - {name: shm, mountPath: /dev/shm}
      {{- range $volumes }}
      - {name: volume-{{ .name }}, mountPath: /var/lib/kvferry/volumes/{{ .name }}}
      {{- end }}
      {{- if and $volumes $root.Values.tier.encryptionKeysSecret }}
      - {name: tier-keys, mountPath: /etc/kvferry/tier, readOnly: true}
      {{- end }}
      {{- include "kvferry.extraList" $role.extraVolumeMounts | nindent 6 }}
  {{- include "kvferry.extraContainers" $role.extraContainers | nindent 2 }}
volumes:
  {{- include "kvferry.scratchVolumes" $root | nindent 2 }}
  {{- include "kvferry.memberVolumes" $root | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ include "kvferry.gib" (include "kvferry.shmGiB" . | float64) }}}
  {{- range $volumes }}
  - name: volume-{{ .name }}
    {{- if .hostPath }}
    # Volumes of this group alone: a volume has one keeper, and pods of several groups may share a node.
    hostPath: {path: {{ printf "%s/%s" (trimSuffix "/" .hostPath) $name }}, type: Directory}
    {{- else if .claimName }}
    persistentVolumeClaim: {claimName: {{ .claimName }}}
    {{- else }}
    ephemeral:
      volumeClaimTemplate:
        metadata: {}
        spec:
          accessModes: [ReadWriteOnce]
          storageClassName: {{ .storageClassName | quote }}
          resources: {requests: {storage: {{ include "kvferry.gib" (ceil (mulf .capacityGiB 1.05)) }}}}
    {{- end }}
  {{- end }}
  {{- if and $volumes $root.Values.tier.encryptionKeysSecret }}
  - name: tier-keys
    secret: {secretName: {{ $root.Values.tier.encryptionKeysSecret }}, defaultMode: 0440}
  {{- end }}
  {{- include "kvferry.extraList" $role.extraVolumes | nindent 2 }}
{{- with $role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $role.affinity }}
affinity:
  {{- toYaml $role.affinity | nindent 2 }}
{{- else if or $role.hostNetwork (include "kvferry.hasHostPath" $root) }}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      {{- if $role.hostNetwork }}
      # Two would want the same ports, and kvferry-rollout knows workers by their host's address.
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "kvferry.selector" $root | nindent 12 }}
            kvferry.io/host-network: "true"
      {{- end }}
      {{- if include "kvferry.hasHostPath" $root }}
      # Two pods of a group on one node would want the same volumes, and each volume has one keeper.
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "kvferry.selector" $root | nindent 12 }}
            kvferry.io/component: {{ $name }}
      {{- end }}
{{- end }}
{{- end -}}

{{/* Gateways as Serve replicas: a group of their own, one replica a pod, which the Service finds by its label. */}}
{{- define "kvferry.gatewayGroup" -}}
{{- $spec := include "kvferry.gatewayPodSpec" . -}}
- groupName: gateway
  {{- include "kvferry.groupCounts" (dict "numPods" (int .Values.gateway.replicas)) | nindent 2 }}
  resources: {kvferry_gateway: "1", CPU: "1"}
  rayStartParams:
    object-store-memory: "134217728"
  template:
    metadata:
      labels:
        {{- include "kvferry.labels" . | nindent 8 }}
        kvferry.io/component: gateway
        kvferry.io/ray: "true"
        {{- include "kvferry.extraList" .Values.gateway.podLabels | nindent 8 }}
      annotations:
        {{- include "kvferry.podAnnotations" (dict "root" . "spec" $spec "section" .Values.gateway) | nindent 8 }}
    spec:
      {{- $spec | nindent 6 }}
{{- end -}}

{{- define "kvferry.gatewayPodSpec" -}}
terminationGracePeriodSeconds: {{ add (int .Values.gateway.lingerSeconds) (include "kvferry.gatewayDrainSeconds" . | int) 20 }}
automountServiceAccountToken: false
{{- include "kvferry.pullSecrets" . | nindent 0 }}
securityContext:
  {{- include "kvferry.podSecurity" . | nindent 2 }}
{{- include "kvferry.podExtras" (dict "root" . "section" .Values.gateway "component" "gateway") }}
{{- include "kvferry.gatewayInit" . }}
containers:
  - name: ray-worker
    image: {{ include "kvferry.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    env:
      {{- include "kvferry.scratchEnv" . | nindent 6 }}
      {{- include "kvferry.rayEnv" . | nindent 6 }}
      - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ include "kvferry.gatewayDrainSeconds" . | quote }}}
      - {name: CUDA_VISIBLE_DEVICES}
      {{- include "kvferry.env" .Values.gateway.env | nindent 6 }}
      {{- include "kvferry.extraEnv" .Values.gateway.extraEnv | nindent 6 }}
    ports:
      {{- include "kvferry.gatewayPorts" . | nindent 6 }}
    # Not ready before Serve has put a gateway here, which it does as soon as the raylet is up.
    readinessProbe:
      {{- include "kvferry.gatewayProbe" (dict "root" . "path" "/readyz") | nindent 6 }}
      periodSeconds: 5
    livenessProbe:
      {{- include "kvferry.rayletProbe" . | nindent 6 }}
      initialDelaySeconds: 60
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 12
    lifecycle:
      preStop:
        # Ray's end is its replicas' too; one that Serve removes lingers by itself.
        exec: {command: [sleep, {{ .Values.gateway.lingerSeconds | toString | quote }}]}
    resources:
      {{- toYaml .Values.gateway.resources | nindent 6 }}
    securityContext:
      {{- include "kvferry.containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- include "kvferry.scratchMounts" . | nindent 6 }}
      {{- include "kvferry.memberMounts" . | nindent 6 }}
      {{- include "kvferry.gatewayMounts" . | nindent 6 }}
      - {name: shm, mountPath: /dev/shm}
      {{- include "kvferry.extraList" .Values.gateway.extraVolumeMounts | nindent 6 }}
  {{- include "kvferry.extraContainers" .Values.gateway.extraContainers | nindent 2 }}
volumes:
  {{- include "kvferry.scratchVolumes" . | nindent 2 }}
  {{- include "kvferry.memberVolumes" . | nindent 2 }}
  {{- include "kvferry.gatewayVolumes" . | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: 1Gi}
  {{- include "kvferry.extraList" .Values.gateway.extraVolumes | nindent 2 }}
{{- with .Values.gateway.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gateway.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gateway.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Submits a command to an existing Ray and waits for its end: {root, command, optional: a failure is said and passes}. */}}
{{- define "kvferry.submitJob" -}}
{{- $root := .root -}}
backoffLimit: 2
template:
  metadata:
    labels:
      {{- include "kvferry.labels" $root | nindent 6 }}
      kvferry.io/component: deploy
  spec:
    restartPolicy: Never
    serviceAccountName: {{ include "kvferry.serviceAccount" $root }}
    automountServiceAccountToken: false
    {{- include "kvferry.pullSecrets" $root | nindent 4 }}
    securityContext:
      {{- include "kvferry.podSecurity" $root | nindent 6 }}
    containers:
      - name: submit
        image: {{ include "kvferry.image" $root }}
        imagePullPolicy: {{ $root.Values.image.pullPolicy }}
        {{- if .optional }}
        command: [sh, -c, '"$@" || echo "not deleted from Ray: see above"', submit]
        {{- else }}
        command: [env]
        {{- end }}
        args: {{ concat (list "ray" "job" "submit" "--address" $root.Values.ray.existing.dashboardAddress "--working-dir" "/etc/kvferry/config" "--") .command | toJson }}
        env:
          - {name: HOME, value: /tmp}
          {{- with $root.Values.ray.existing.tokenSecret }}
          - {name: RAY_AUTH_MODE, value: token}
          - name: RAY_AUTH_TOKEN
            valueFrom: {secretKeyRef: {name: {{ . }}, key: auth_token}}
          {{- end }}
        resources:
          requests: {cpu: 100m, memory: 512Mi}
          limits: {memory: 1Gi}
        securityContext:
          {{- include "kvferry.containerSecurity" $root | nindent 10 }}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
          - {name: config, mountPath: /etc/kvferry/config, readOnly: true}
    volumes:
      - name: tmp
        emptyDir: {}
      - name: config
        configMap: {name: {{ include "kvferry.fullname" $root }}-config}
{{- end -}}

{{/* The Ray cluster of this release. */}}
{{- define "kvferry.rayCluster" -}}
{{- $headSpec := include "kvferry.headPodSpec" . -}}
{{- $groups := include "kvferry.groups" . | fromJsonArray -}}
rayVersion: {{ .Values.ray.version | quote }}
{{- if .Values.ray.tokenAuth }}
authOptions: {mode: token}
{{- end }}
# Counts are those of the values; kvferry-rollout takes them to the cluster.
enableInTreeAutoscaling: false
{{- with .Values.ray.redis }}
{{- if .address }}
gcsFaultToleranceOptions:
  redisAddress: {{ .address | quote }}
  {{- if .passwordSecret }}
  redisPassword:
    valueFrom: {secretKeyRef: {name: {{ .passwordSecret | quote }}, key: {{ .passwordKey | quote }}}}
  {{- end }}
{{- end }}
{{- end }}
headGroupSpec:
  rayStartParams:
    # Replicas belong on workers.
    num-cpus: "0"
    dashboard-host: 0.0.0.0
    object-store-memory: "134217728"
  template:
    metadata:
      labels:
        {{- include "kvferry.labels" . | nindent 8 }}
        kvferry.io/component: head
        kvferry.io/ray: "true"
        {{- include "kvferry.extraList" .Values.ray.head.podLabels | nindent 8 }}
      annotations:
        {{- include "kvferry.podAnnotations" (dict "root" . "spec" $headSpec "section" .Values.ray.head "more" .Values.ray.redis) | nindent 8 }}
        # Where groups are only added at the end, KubeRay takes the RayService's counts to the RayCluster by itself, and
        # ends whichever pods are too many; not where anything else differs.
        kvferry.io/groups: {{ range $groups }}{{ .name }}.{{ end }}{{ .Values.gateway.mode }}
    spec:
      {{- $headSpec | nindent 6 }}
workerGroupSpecs:
  {{- range $group := $groups }}
  {{- include "kvferry.workerGroup" (dict "root" $ "group" $group) | nindent 2 }}
  {{- end }}
  {{- if eq .Values.gateway.mode "serve" }}
  {{- include "kvferry.gatewayGroup" . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* What tells one release from another. */}}
{{- define "kvferry.releaseDigest" -}}
{{ list (include "kvferry.rayCluster" . | fromYaml) (include "kvferry.gangLabels" . | fromYaml) (include "kvferry.serveConfig" . | fromYaml) | toJson | sha256sum }}
{{- end -}}

{{- define "kvferry.headPodSpec" -}}
automountServiceAccountToken: false
{{- include "kvferry.pullSecrets" . | nindent 0 }}
securityContext:
  {{- include "kvferry.podSecurity" . | nindent 2 }}
{{- include "kvferry.podExtras" (dict "root" . "section" .Values.ray.head "component" "head") }}
{{- with .Values.ray.head.extraInitContainers }}
initContainers:
  {{- include "kvferry.extraContainers" . | nindent 2 }}
{{- end }}
containers:
  - name: ray-head
    image: {{ include "kvferry.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    env:
      {{- include "kvferry.scratchEnv" . | nindent 6 }}
      {{- include "kvferry.rayEnv" . | nindent 6 }}
      {{- include "kvferry.extraEnv" .Values.ray.head.extraEnv | nindent 6 }}
    ports:
      - {name: gcs-server, containerPort: 6379}
      - {name: dashboard, containerPort: 8265}
      - {name: client, containerPort: 10001}
      # Without a port of this name KubeRay makes no service for Serve, and a RayService is never ready.
      - {name: serve, containerPort: 8000}
    resources:
      requests: {cpu: {{ include "kvferry.cpus" (float64 .Values.ray.head.cpu) }}, memory: {{ include "kvferry.gib" .Values.ray.head.memoryGiB }}}
      limits: {memory: {{ include "kvferry.gib" .Values.ray.head.memoryGiB }}}
    securityContext:
      {{- include "kvferry.containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- include "kvferry.scratchMounts" . | nindent 6 }}
      - {name: shm, mountPath: /dev/shm}
      {{- include "kvferry.extraList" .Values.ray.head.extraVolumeMounts | nindent 6 }}
  {{- include "kvferry.extraContainers" .Values.ray.head.extraContainers | nindent 2 }}
volumes:
  {{- include "kvferry.scratchVolumes" . | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: 1Gi}
  {{- include "kvferry.extraList" .Values.ray.head.extraVolumes | nindent 2 }}
{{- with .Values.ray.head.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.ray.head.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.ray.head.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
