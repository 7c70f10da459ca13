{{/* prfaas.toml of a set, and the variables for what only the pod knows. */}}

{{/* The settings that values give to a set, as YAML: of the sections that its service reads. */}}
{{- define "prfaas.settings" -}}
{{- $all := mustMergeOverwrite (deepCopy .root.Values.config) (deepCopy .set.values.config) -}}
{{- $worker := list "cluster" "store" "worker" "kv" "cache" "security" "log" -}}
{{- $sections := dict
  "router" (list "cluster" "store" "routing" "router" "http" "admission" "breakers" "canary" "cache" "security" "log")
  "prefillWorker" $worker
  "decodeWorker" $worker
  "cachePool" (list "cluster" "store" "pool" "kv" "security" "log") -}}
{{- $own := dict -}}
{{- range default list (get $sections .set.component) }}{{ if hasKey $all . }}{{ $_ := set $own . (get $all .) }}{{ end }}{{ end -}}
{{- $own | toYaml -}}
{{- end }}

{{- define "prfaas.storeEndpoints" -}}
{{- if .Values.store.endpoints -}}
{{- .Values.store.endpoints | toJson -}}
{{- else -}}
{{- $name := printf "%s-etcd" (include "prfaas.fullname" .) -}}
{{- $members := list -}}
{{- range $i := until (int .Values.etcd.replicaCount) }}{{ $members = append $members (printf "%s-%d.%s.%s.svc:%d" $name $i $name $.Release.Namespace (int $.Values.etcd.ports.client)) }}{{ end -}}
{{- $members | toJson -}}
{{- end -}}
{{- end }}

{{/* Adds to .settings, in .section, the .values that the chart knows. */}}
{{- define "prfaas.put" -}}
{{- $_ := set .settings .section (mustMergeOverwrite (default dict (get .settings .section)) .values) -}}
{{- end }}

{{- define "prfaas.toml" -}}
{{- $values := .root.Values -}}
{{- $own := .set.values -}}
{{- $ports := $own.ports -}}
{{- $settings := include "prfaas.settings" . | fromYaml -}}
{{- $model := printf "/models/%s" $values.model.folder -}}
{{- $any := "0.0.0.0" -}}
{{- $store := dict "endpoints" (include "prfaas.storeEndpoints" .root | fromJsonArray) -}}
{{- if $values.store.tls.enabled -}}
{{- $folder := empty $values.store.tls.existingSecret | ternary "/etc/prfaas/tls" "/etc/prfaas/store-tls" -}}
{{- $store = merge $store (dict "ca" (printf "%s/ca.crt" $folder) "cert" (printf "%s/tls.crt" $folder) "key" (printf "%s/tls.key" $folder)) -}}
{{- end -}}
{{- include "prfaas.put" (dict "settings" $settings "section" "store" "values" $store) -}}
{{- include "prfaas.put" (dict "settings" $settings "section" "cluster" "values" (dict "name" $values.cluster.name "pd_region" $values.cluster.pdRegion)) -}}
{{- if eq $values.security.mode "mtls" -}}
{{- include "prfaas.put" (dict "settings" $settings "section" "security" "values" (dict "mode" "mtls" "ca" "/etc/prfaas/tls/ca.crt" "cert" "/etc/prfaas/tls/tls.crt" "key" "/etc/prfaas/tls/tls.key")) -}}
{{- else -}}
{{- include "prfaas.put" (dict "settings" $settings "section" "security" "values" (dict "mode" "off" "allow_plain" true)) -}}
{{- end -}}
{{- if eq .set.component "router" -}}
{{- $router := dict "host" $any "port" $ports.http "model_dir" $model "metrics_host" $any "metrics_port" $ports.metrics -}}
{{- if $own.tls.existingSecret }}{{ $router = merge $router (dict "tls_cert" "/etc/prfaas/https/tls.crt" "tls_key" "/etc/prfaas/https/tls.key") }}{{ end -}}
{{- if $own.admin.existingSecret }}{{ $router = merge $router (dict "admin_host" $any "admin_port" $ports.admin) }}{{ end -}}
{{- include "prfaas.put" (dict "settings" $settings "section" "router" "values" $router) -}}
{{- if $own.apiKeys.existingSecret }}{{ include "prfaas.put" (dict "settings" $settings "section" "admission" "values" (dict "keys_file" "/etc/prfaas/api-keys/keys.toml")) }}{{ end -}}
{{- if $values.cache.existingSecret }}{{ include "prfaas.put" (dict "settings" $settings "section" "cache" "values" (dict "secret_file" "/etc/prfaas/cache/secret")) }}{{ end -}}
{{- else if eq .set.component "cachePool" -}}
{{- $pool := dict "region" $values.region "model_dir" $model "rpc_host" $any "rpc_port" $ports.rpc "kv_host" $any "kv_port" $ports.kv "metrics_host" $any "metrics_port" $ports.metrics -}}
{{- if and $own.persistence.enabled (not (dig "pool" "store" "" $settings)) }}{{ $pool = merge $pool (dict "store" "disk") }}{{ end -}}
{{- if $own.persistence.enabled }}{{ $pool = merge $pool (dict "disk_dir" "/data/pool") }}{{ end -}}
{{- include "prfaas.put" (dict "settings" $settings "section" "pool" "values" $pool) -}}
{{- else -}}
{{- $worker := dict "region" $values.region "model_dir" $model "rpc_host" $any "rpc_port" $ports.rpc "link_port" $ports.link "metrics_host" $any "metrics_port" $ports.metrics -}}
{{- if $own.hardware }}{{ $worker = merge $worker (dict "hardware" $own.hardware) }}{{ end -}}
{{- if and (eq .set.component "decodeWorker") $own.role }}{{ $worker = merge $worker (dict "role" $own.role) }}{{ end -}}
{{- include "prfaas.put" (dict "settings" $settings "section" "worker" "values" $worker) -}}
{{- include "prfaas.put" (dict "settings" $settings "section" "kv" "values" (dict "host" $any "port" $ports.kv)) -}}
{{- end -}}
{{- range $section, $fields := $settings }}
[{{ $section }}]
{{- range $name, $value := $fields }}
{{- if not (kindIs "invalid" $value) }}
{{ $name }} = {{ include "prfaas.tomlValue" $value }}
{{- end }}
{{- end }}
{{ end }}
{{- end }}

{{/* Numbers come as floats: whole ones are written as such. */}}
{{- define "prfaas.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- $pairs := list }}{{ range $key, $value := . }}{{ $pairs = append $pairs (printf "%s = %s" ($key | toJson) (include "prfaas.tomlValue" $value)) }}{{ end }}{{ join ", " $pairs -}} }
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}
{{- . | int64 -}}
{{- else -}}
{{- . | toJson -}}
{{- end -}}
{{- end }}

{{/* At which host a pod is reached: by its own region, and by others. */}}
{{- define "prfaas.outsideHost" -}}
{{- $across := .set.values.acrossRegions -}}
{{- if eq $across.mode "loadBalancer" -}}
$(POD_NAME).{{ $across.domain }}
{{- else if and (eq $across.mode "hostNetwork") $across.domain -}}
$(NODE_NAME).{{ $across.domain }}
{{- else -}}
$(POD_IP)
{{- end -}}
{{- end }}

{{/* KV: in the own region by the pod's address, in every other by the one made for it. */}}
{{- define "prfaas.kvAdvertise" -}}
{{- $pairs := list (printf "=$(POD_IP):%d" (int .set.values.ports.kv)) -}}
{{- $outside := include "prfaas.outsideHost" . -}}
{{- $kv := int .set.values.ports.kv -}}
{{- if ne $outside "$(POD_IP)" -}}
{{- range .root.Values.regions }}{{ if ne .name $.root.Values.region }}{{ $pairs = append $pairs (printf "%s=%s:%d" .name $outside $kv) }}{{ end }}{{ end -}}
{{- end -}}
{{- join "," $pairs -}}
{{- end }}

{{- define "prfaas.env" -}}
{{- $own := .set.values -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- with .root.Values.store.existingSecret }}
- name: PRFAAS_STORE_USERNAME
  valueFrom: {secretKeyRef: {name: {{ . }}, key: username}}
- name: PRFAAS_STORE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ . }}, key: password}}
{{- end }}
{{- if eq .set.component "router" }}
{{- with $own.admin.existingSecret }}
- name: PRFAAS_ROUTER_ADMIN_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: admin-key}}
{{- end }}
{{- else if eq .set.component "cachePool" }}
- name: PRFAAS_POOL_ID
  value: {{ printf "%s-$(POD_NAME)" .root.Values.region }}
- name: PRFAAS_POOL_RPC_ADVERTISE
  value: {{ printf "%s:%d" (include "prfaas.outsideHost" .) (int $own.ports.rpc) }}
- name: PRFAAS_POOL_KV_ADVERTISE
  value: {{ printf "=$(POD_IP):%d" (int $own.ports.kv) | quote }}
{{- if eq (dig "pool" "store" "" (include "prfaas.settings" . | fromYaml)) "mooncake" }}
- name: PRFAAS_POOL_MOONCAKE_HOST
  value: $(POD_IP)
{{- end }}
{{- else }}
{{- /* Only routers call a worker, and they are in the region that decodes. */}}
{{- $host := eq .set.component "prefillWorker" | ternary (include "prfaas.outsideHost" .) "$(POD_IP)" }}
- name: PRFAAS_WORKER_ID
  value: {{ printf "%s-$(POD_NAME)" .root.Values.region }}
- name: PRFAAS_WORKER_RPC_ADVERTISE
  value: {{ printf "%s:%d" $host (int $own.ports.rpc) }}
- name: PRFAAS_WORKER_LINK_ADVERTISE
  value: {{ printf "%s:%d" $host (int $own.ports.link) }}
- name: PRFAAS_KV_ADVERTISE
  value: {{ include "prfaas.kvAdvertise" . | quote }}
{{- end }}
{{- with $own.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Seconds that a pod needs to leave in order. */}}
{{- define "prfaas.leastGrace" -}}
{{- $section := get (dict "router" "router" "cachePool" "pool" "prefillWorker" "worker" "decodeWorker" "worker") .set.component -}}
{{- $default := eq .set.component "cachePool" | ternary 10 30 -}}
{{- $drain := 0 -}}
{{- if $section }}{{ $drain = dig $section "drain_timeout_s" $default (include "prfaas.settings" . | fromYaml) }}{{ end -}}
{{- add (int .set.values.preStopSeconds) (int (ceil $drain)) 30 -}}
{{- end }}
