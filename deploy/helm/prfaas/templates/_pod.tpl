{{/* The pod of a set of ours. */}}

{{- define "prfaas.podMeta" -}}
labels:
  {{- include "prfaas.labels" . | nindent 2 }}
  {{- with .set.values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- if ne .set.component "etcd" }}
  checksum/config: {{ include "prfaas.toml" . | sha256sum }}
  {{- end }}
  {{- with .set.values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "prfaas.placement" -}}
{{- $own := .set.values -}}
serviceAccountName: {{ include "prfaas.serviceAccount" . }}
automountServiceAccountToken: false
# Variables of other services could pass for settings of ours, which are refused when unknown.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ kindIs "invalid" $own.terminationGracePeriodSeconds | ternary (include "prfaas.leastGrace" .) $own.terminationGracePeriodSeconds }}
{{- with $own.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if eq $own.acrossRegions.mode "hostNetwork" }}{{ if has .set.component (list "prefillWorker" "decodeWorker" "cachePool") }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}{{ end }}
securityContext:
  {{- toYaml $own.podSecurityContext | nindent 2 }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml . | nindent 4 | trim }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels:
        {{- include "prfaas.selector" $ | nindent 8 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Ports by name. A router process has pages of its own. */}}
{{- define "prfaas.ports" -}}
{{- $own := .set.values -}}
{{- $processes := int (dig "router" "workers" 1 (include "prfaas.settings" . | fromYaml)) -}}
{{- range $name, $port := $own.ports }}
{{- if and (eq $.set.component "router") (eq $name "metrics") }}
{{- range $i := until $processes }}
- {name: {{ eq $i 0 | ternary "metrics" (printf "metrics-%d" $i) }}, containerPort: {{ add $port $i }}}
{{- end }}
{{- else if and (eq $.set.component "router") (eq $name "admin") }}
{{- if $own.admin.existingSecret }}
{{- range $i := until $processes }}
- {name: {{ eq $i 0 | ternary "admin" (printf "admin-%d" $i) }}, containerPort: {{ add $port $i }}}
{{- end }}
{{- end }}
{{- else }}
- {name: {{ $name }}, containerPort: {{ $port }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "prfaas.probes" -}}
{{- range $probe, $path := dict "startup" .startup "readiness" .readiness "liveness" .liveness }}
{{ $probe }}Probe:
  httpGet: {path: {{ $path | quote }}, port: metrics}
  {{- toYaml (get $.probes $probe) | nindent 2 }}
{{- end }}
{{- end }}

{{- define "prfaas.pod" -}}
{{- $own := .set.values -}}
{{- $values := .root.Values -}}
{{ include "prfaas.placement" . }}
containers:
  - name: {{ .set.role }}
    image: {{ include "prfaas.image" . | quote }}
    imagePullPolicy: {{ $own.image.pullPolicy }}
    args:
      - {{ .set.role }}
      - --config=/etc/prfaas/config/prfaas.toml
      {{- with $own.extraArgs }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    env:
      {{- include "prfaas.env" . | nindent 6 }}
    ports:
      {{- include "prfaas.ports" . | trim | nindent 6 }}
    {{- include "prfaas.probes" (dict "probes" $own.probes "startup" "/live" "readiness" "/ready" "liveness" "/live") | trim | nindent 4 }}
    {{- if $own.preStopSeconds }}
    lifecycle:
      preStop:
        sleep: {seconds: {{ $own.preStopSeconds }}}
    {{- end }}
    resources:
      {{- toYaml $own.resources | nindent 6 }}
    securityContext:
      {{- toYaml $own.securityContext | nindent 6 }}
    volumeMounts:
      - {name: config, mountPath: /etc/prfaas/config, readOnly: true}
      - {name: model, mountPath: /models, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      {{- range $volume, $secret := include "prfaas.secrets" . | fromYaml }}
      - {name: {{ $volume }}, mountPath: /etc/prfaas/{{ $volume }}, readOnly: true}
      {{- end }}
      {{- if eq .set.component "cachePool" }}{{ if $own.persistence.enabled }}
      - {name: data, mountPath: /data}
      {{- end }}{{ end }}
      {{- with $own.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: config
    configMap: {name: {{ .set.name }}}
  - name: model
    {{- toYaml $values.model.volume | nindent 4 }}
  - name: tmp
    emptyDir: {sizeLimit: {{ $own.tmp.sizeLimit }}}
  {{- range $volume, $secret := include "prfaas.secrets" . | fromYaml }}
  - name: {{ $volume }}
    secret: {secretName: {{ $secret }}, defaultMode: 0440}
  {{- end }}
  {{- with $own.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Secrets that are mounted under /etc/prfaas, by folder. */}}
{{- define "prfaas.secrets" -}}
{{- $own := .set.values -}}
{{- $values := .root.Values -}}
{{- $mounted := dict -}}
{{- if eq $values.security.mode "mtls" }}{{ $_ := set $mounted "tls" $own.existingSecret }}{{ end -}}
{{- if and $values.store.tls.enabled $values.store.tls.existingSecret }}{{ $_ := set $mounted "store-tls" $values.store.tls.existingSecret }}{{ end -}}
{{- if eq .set.component "router" -}}
{{- if $own.tls.existingSecret }}{{ $_ := set $mounted "https" $own.tls.existingSecret }}{{ end -}}
{{- if $own.apiKeys.existingSecret }}{{ $_ := set $mounted "api-keys" $own.apiKeys.existingSecret }}{{ end -}}
{{- if $values.cache.existingSecret }}{{ $_ := set $mounted "cache" $values.cache.existingSecret }}{{ end -}}
{{- end -}}
{{- $mounted | toYaml -}}
{{- end }}
