{{/* Names, labels and the sets: what this region runs, one for each component, or for each pool of one. */}}

{{- define "prfaas.fullname" -}}
{{- default .Release.Name .Values.nameOverride | trunc 20 | trimSuffix "-" -}}
{{- end }}

{{- define "prfaas.role" -}}
{{- get (dict "router" "router" "prefillWorker" "prefill-worker" "decodeWorker" "decode-worker" "cachePool" "cache-pool" "etcd" "store") . -}}
{{- end }}

{{/* Puts into .sets a list of: component, role, pool, name, values (defaults, component's, pool's, merged). */}}
{{- define "prfaas.collect" -}}
{{- $root := .root -}}
{{- include "prfaas.check" $root -}}
{{- $sets := list -}}
{{- $roles := list -}}
{{- range $root.Values.regions }}{{ if eq .name $root.Values.region }}{{ $roles = .roles }}{{ end }}{{ end -}}
{{- range $component := list "etcd" "cachePool" "prefillWorker" "decodeWorker" "router" -}}
{{- if has $component $roles -}}
{{- $own := get $root.Values $component -}}
{{- $base := mustMergeOverwrite (deepCopy $root.Values.defaults) (deepCopy (omit $own "pools")) -}}
{{- $role := include "prfaas.role" $component -}}
{{- $name := printf "%s-%s" (include "prfaas.fullname" $root) (eq $component "etcd" | ternary "etcd" $role) -}}
{{- if hasKey $own "pools" -}}
{{- range $pool, $values := default (dict "default" dict) $own.pools -}}
{{- $merged := mustMergeOverwrite (deepCopy $base) (deepCopy (default dict $values)) -}}
{{- $sets = append $sets (dict "component" $component "role" $role "pool" $pool "name" (printf "%s-%s" $name $pool) "values" $merged) -}}
{{- end -}}
{{- else -}}
{{- $sets = append $sets (dict "component" $component "role" $role "pool" "default" "name" $name "values" $base) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $sets }}{{ include "prfaas.checkSet" (dict "root" $root "set" .) }}{{ end -}}
{{- $_ := set . "sets" $sets -}}
{{- end }}

{{/* What the schema cannot say. */}}
{{- define "prfaas.check" -}}
{{- $names := list -}}
{{- range .Values.regions }}{{ $names = append $names .name }}{{ end -}}
{{- if ne (len $names) (len (uniq $names)) }}{{ fail "regions: a name is there twice" }}{{ end -}}
{{- if not (has .Values.region $names) }}{{ fail (printf "region: %q is none of regions" .Values.region) }}{{ end -}}
{{- $pd := .Values.cluster.pdRegion -}}
{{- if not (has $pd $names) }}{{ fail (printf "cluster.pdRegion: %q is none of regions" $pd) }}{{ end -}}
{{- range $each := .Values.regions -}}
{{- if ne $each.name $pd -}}
{{- range $role := list "router" "decodeWorker" }}{{ if has $role $each.roles }}{{ fail (printf "regions: %s has %s, which only cluster.pdRegion = %s can have" $each.name $role $pd) }}{{ end }}{{ end -}}
{{- else if has "prefillWorker" $each.roles -}}
{{- fail (printf "regions: %s is cluster.pdRegion: what prefills there are decode workers" $pd) -}}
{{- end -}}
{{- if and (eq $each.name $.Values.region) (not (has "etcd" $each.roles)) (not $.Values.store.endpoints) -}}
{{- fail "store.endpoints: is required in a region without etcd" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.security.mode "off") .Values.store.tls.enabled (not .Values.store.tls.existingSecret) -}}
{{- fail "store.tls.existingSecret: is required with security.mode = off, or store.tls.enabled = false" -}}
{{- end -}}
{{- end }}

{{- define "prfaas.checkSet" -}}
{{- $v := .set.values -}}
{{- if and (has .set.component (list "prefillWorker" "decodeWorker" "cachePool")) (eq $v.acrossRegions.mode "loadBalancer") (not $v.acrossRegions.domain) -}}
{{- fail (printf "%s: acrossRegions.domain is required with mode = loadBalancer" .set.component) -}}
{{- end -}}
{{- if and (not (kindIs "invalid" $v.terminationGracePeriodSeconds)) (lt (int $v.terminationGracePeriodSeconds) (int (include "prfaas.leastGrace" .))) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds must be at least %s, or a drain is cut short" .set.component (include "prfaas.leastGrace" .)) -}}
{{- end -}}
{{- if and (eq .set.component "cachePool") (eq (dig "pool" "store" "" (include "prfaas.settings" . | fromYaml)) "disk") (not $v.persistence.enabled) -}}
{{- fail "cachePool.config.pool.store: disk needs cachePool.persistence.enabled" -}}
{{- end -}}
{{- end }}

{{/* What never changes in a set's life. */}}
{{- define "prfaas.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .set.role }}
pool: {{ .set.pool }}
{{- end }}

{{- define "prfaas.labels" -}}
{{ include "prfaas.selector" . }}
app.kubernetes.io/part-of: prfaas
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
role: {{ .set.role }}
region: {{ .root.Values.region }}
{{- end }}

{{/* Of what belongs to no set. */}}
{{- define "prfaas.releaseLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: prfaas
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
region: {{ .Values.region }}
{{- end }}

{{- define "prfaas.serviceAccount" -}}
{{- default (.set.values.serviceAccount.create | ternary .set.name "default") .set.values.serviceAccount.name -}}
{{- end }}

{{- define "prfaas.image" -}}
{{- $image := .set.values.image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}{{ end -}}
{{- end }}

{{/* Most pods that the set can have. */}}
{{- define "prfaas.mostReplicas" -}}
{{- .set.values.autoscaling.enabled | ternary .set.values.autoscaling.maxReplicas .set.values.replicaCount -}}
{{- end }}
