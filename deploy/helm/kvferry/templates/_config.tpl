{{/*
kvferry's configuration, the same for every process: what the values say under `config`, and what the chart decides. It
holds no counts but 0 and 1, so that changing them restarts nobody. As YAML.
*/}}
{{- define "kvferry.config" -}}
{{- $v := .Values -}}
{{- $internal := "/etc/kvferry/tls/internal" -}}
{{- $config := deepCopy $v.config -}}
{{- $_ := set $config "insecure" $v.insecure -}}

{{- range $name := list "prefill" "decode" -}}
{{- $role := index $v.roles $name -}}
{{- $section := dict "replicas" (min 1 (int $role.replicas)) "num_cpus" $role.cpusPerWorker "num_gpus" $role.gpusPerWorker -}}
{{- if eq $v.ray.mode "rayservice" -}}
{{- $_ := set $section "resources" (dict (printf "kvferry_%s" $name) 1) -}}
{{- end -}}
{{- if $role.engine -}}{{- $_ := set $section "engine" $role.engine -}}{{- end -}}
{{- $_ := set $config $name $section -}}
{{- end -}}
{{- if $config.models -}}
{{- $_ := set $config "models" (include "kvferry.entries" (dict "root" . "max" 1) | fromJsonArray) -}}
{{- end -}}

{{- $engine := merge (dict "side_channel_host" "auto") (default dict $config.engine) -}}
{{- $_ := set $config "engine" $engine -}}

{{- $tls := dict "cert_file" (printf "%s/tls.crt" $internal) "key_file" (printf "%s/tls.key" $internal) "ca_file" (printf "%s/ca.crt" $internal) "server_name" "kvferry.internal" -}}
{{- $_ := set $config "worker" (merge (dict "host" "auto" "tls" $tls) (default dict $config.worker)) -}}

{{- $gateway := dict "replicas" (ternary 1 0 (eq $v.gateway.mode "serve")) "host" "0.0.0.0" "http_port" (int $v.gateway.httpPort) "grpc_port" nil "linger_s" $v.gateway.lingerSeconds -}}
{{- if $v.gateway.grpcPort -}}{{- $_ := set $gateway "grpc_port" (int $v.gateway.grpcPort) -}}{{- end -}}
{{- if eq $v.gateway.mode "serve" -}}
{{- $_ := set $gateway "num_cpus" 1 -}}
{{- $_ := set $gateway "resources" (dict "kvferry_gateway" 1) -}}
{{- end -}}
{{- if include "kvferry.keysSecret" . -}}{{- $_ := set $gateway "keys_file" "/etc/kvferry/keys/keys.yaml" -}}{{- end -}}
{{- if $v.gateway.tls.secretName -}}
{{- $server := dict "cert_file" "/etc/kvferry/tls/gateway/tls.crt" "key_file" "/etc/kvferry/tls/gateway/tls.key" -}}
{{- if $v.gateway.tls.requireClientCertificates -}}{{- $_ := set $server "client_ca_file" "/etc/kvferry/tls/gateway/ca.crt" -}}{{- end -}}
{{- $_ := set $gateway "tls" $server -}}
{{- end -}}
{{- $_ := set $config "gateway" (merge $gateway (default dict $config.gateway)) -}}

{{- $membership := dict "endpoints" (include "kvferry.etcdEndpoints" . | fromJsonArray) -}}
{{- if include "kvferry.etcdTlsSecret" . -}}
{{- $_ := set $membership "ca_file" "/etc/kvferry/etcd/ca.crt" -}}
{{- $_ := set $membership "cert_file" "/etc/kvferry/etcd/tls.crt" -}}
{{- $_ := set $membership "key_file" "/etc/kvferry/etcd/tls.key" -}}
{{- end -}}
{{- $user := ternary "kvferry" $v.etcd.external.user $v.etcd.enabled -}}
{{- if $user -}}
{{- $_ := set $membership "user" $user -}}
{{- $_ := set $membership "password_file" "/etc/kvferry/etcd/password" -}}
{{- end -}}
{{- $_ := set $config "membership" (merge $membership (default dict $config.membership)) -}}

{{- if $v.tier.enabled -}}
{{- $volumes := list -}}
{{- range $v.tier.volumes -}}
{{- $volume := dict "path" (printf "/var/lib/kvferry/volumes/%s" .name) "capacity_gib" .capacityGiB "shared" (not (empty .claimName)) -}}
{{- if .writeGiBPerDay -}}{{- $_ := set $volume "write_gib_per_day" .writeGiBPerDay -}}{{- end -}}
{{- $volumes = append $volumes $volume -}}
{{- end -}}
{{- $tier := dict "enabled" true "cpu_gib" $v.tier.cpuGiB "volumes" $volumes "host" "auto" -}}
{{- if $v.tier.encryptionKeysSecret -}}{{- $_ := set $tier "encryption_keys_file" "/etc/kvferry/tier/keys.json" -}}{{- end -}}
{{- $_ := set $config "tier" (merge $tier (default dict $config.tier)) -}}
{{- end -}}
{{- if $v.monitoring.members.enabled -}}
{{- $_ := set $config "metrics" (dict "host" "auto" "gateway_port" 9400 "worker_port" 9420 "keeper_port" 9440 "tls" (merge (dict "ca_file" "/etc/kvferry/tls/metrics/ca.crt") (omit $tls "server_name"))) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/*
Entries of config.models as kvferry reads them, with counts up to `max` and the place of their workers: {root, max}. A
Ray that is there gets them as they are. As JSON.
*/}}
{{- define "kvferry.entries" -}}
{{- $root := .root -}}
{{- $max := .max -}}
{{- $entries := list -}}
{{- range $each := $root.Values.config.models -}}
{{- $entry := deepCopy $each -}}
{{- if eq $root.Values.ray.mode "rayservice" -}}
{{- range $kind := list "prefill" "decode" -}}
{{- $role := include "kvferry.role" (dict "root" $root "kind" $kind "entry" $entry.name) | fromJson -}}
{{- $section := dict "replicas" (min $max (int $role.replicas)) "num_cpus" $role.cpusPerWorker "num_gpus" $role.gpusPerWorker "resources" (dict (printf "kvferry_%s-%s" $kind $entry.name) 1) -}}
{{- if $role.engine -}}{{- $_ := set $section "engine" $role.engine -}}{{- end -}}
{{- $_ := set $entry $kind $section -}}
{{- end -}}
{{- end -}}
{{- $entries = append $entries $entry -}}
{{- end -}}
{{- toJson $entries -}}
{{- end -}}

{{/*
The configuration of one model's workers, without what is of others: {root, entry: its name, or empty}. As YAML. Names
that gateways follow are no part of it, so that changing them restarts nobody.
*/}}
{{- define "kvferry.modelConfig" -}}
{{- $config := include "kvferry.config" .root | fromYaml -}}
{{- $model := $config.model -}}
{{- if .entry -}}
{{- $config = omit $config "model" "adapters" -}}
{{- range $role := list "prefill" "decode" -}}{{- $_ := set $config $role (dict "replicas" 0) -}}{{- end -}}
{{- range $entry := $config.models -}}
{{- if eq $entry.name $.entry -}}
{{- $_ := set $entry "model" (omit ($entry.model | default dict) "aliases" "canary") -}}
{{- $_ := set $config "models" (list $entry) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $config = omit $config "models" -}}
{{- $_ := set $config "model" (omit $model "aliases" "canary") -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* What Serve's gateways follow while they serve (kvferry.app, `_models`). As YAML. */}}
{{- define "kvferry.followed" -}}
{{- $v := .Values -}}
{{- $followed := dict "prefill" (int $v.roles.prefill.replicas) "decode" (int $v.roles.decode.replicas) -}}
{{- with pick $v.config.model "aliases" "canary" -}}{{- $_ := set $followed "model" . -}}{{- end -}}
{{- if $v.config.models -}}
{{- $_ := set $followed "models" (include "kvferry.entries" (dict "root" $ "max" 1000000) | fromJsonArray) -}}
{{- end -}}
{{- toYaml $followed -}}
{{- end -}}

{{/* For `serve deploy`, and as a RayService's serveConfigV2. Counts stand beside the arguments: Serve changes them
in place. Serve's version of an application is a digest of its arguments (ray.serve, get_app_code_version), so each
model of config.models is an application of its own. */}}
{{- define "kvferry.serveConfig" -}}
{{- $v := .Values -}}
proxy_location: Disabled
http_options:
  host: 127.0.0.1
applications:
  {{- if or (include "kvferry.servesDefault" .) (eq $v.gateway.mode "serve") }}
  - name: kvferry
    import_path: kvferry.app:application
    route_prefix: null
    args:
      model_folder: {{ include "kvferry.modelFolder" . | quote }}
      {{- if $v.model.weights.enabled }}
      hub_model: {name: {{ $v.config.model.path | quote }}, revision: {{ include "kvferry.modelRevision" . | quote }}}
      {{- end }}
      config:
        {{- include "kvferry.modelConfig" (dict "root" . "entry" "") | nindent 8 }}
    deployments:
      {{- if gt (int $v.roles.prefill.replicas) 0 }}
      - name: PrefillWorker
        num_replicas: {{ int $v.roles.prefill.replicas }}
      {{- end }}
      {{- if gt (int $v.roles.decode.replicas) 0 }}
      - name: DecodeWorker
        num_replicas: {{ int $v.roles.decode.replicas }}
      {{- end }}
      {{- if eq $v.gateway.mode "serve" }}
      - name: Gateway
        num_replicas: {{ int $v.gateway.replicas }}
        user_config:
          {{- include "kvferry.followed" . | nindent 10 }}
      {{- end }}
  {{- end }}
  {{- range $entry := $v.config.models }}
  - name: kvferry-model-{{ $entry.name }}
    import_path: kvferry.app:application
    route_prefix: null
    args:
      entry: {{ $entry.name | quote }}
      {{- with include "kvferry.entryWeights" (dict "root" $ "entry" $entry.name) }}
      {{- $model := fromJson . }}
      hub_model: {name: {{ $model.path | quote }}, revision: {{ $model.revision | quote }}}
      {{- end }}
      config:
        {{- include "kvferry.modelConfig" (dict "root" $ "entry" $entry.name) | nindent 8 }}
    deployments:
      {{- range include "kvferry.groups" $ | fromJsonArray }}
      {{- if eq .entry $entry.name }}
      - name: {{ title .kind }}Worker-{{ .entry }}
        num_replicas: {{ int .role.replicas }}
      {{- end }}
      {{- end }}
  {{- end }}
{{- end -}}
