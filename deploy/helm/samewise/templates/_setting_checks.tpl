{{/* Checks only settings that can conflict with the chart; the server checks the rest. */}}
{{- define "samewise.checkSettings" -}}
{{- with .Values.settings -}}
{{- if and .isolate_keys (not (include "samewise.hasKeys" $)) }}
  {{- fail "settings.isolate_keys needs apiKeys" }}
{{- end }}
{{- if and $.Values.gpu.enabled (has .device (list "auto" "cpu")) }}
  {{- fail "gpu.enabled sets settings.device to cuda; leave settings.device out" }}
{{- end }}
{{- if and (hasKey . "host") (not (has .host (list "0.0.0.0" "::"))) }}
  {{- fail "settings.host: pods are reached at their own addresses; leave it out, or set it to :: in an IPv6-only cluster" }}
{{- end }}
{{- if and (hasKey . "metrics_prefix") (not (regexMatch "^[a-zA-Z]([a-zA-Z0-9_]{0,61}[a-zA-Z0-9])?$" .metrics_prefix)) }}
  {{- fail (printf "settings.metrics_prefix: %q must also be valid as a pod label: 1 to 63 letters, digits and _, starting with a letter and not ending with _" .metrics_prefix) }}
{{- end }}
{{- if and .otlp_traces_endpoint (not (regexMatch "^https?://[^/]" (lower .otlp_traces_endpoint))) }}
  {{- fail (printf "settings.otlp_traces_endpoint: %q is not a collector's URL, for example http://collector.monitoring:4318" .otlp_traces_endpoint) }}
{{- end }}
{{- if .models }}{{ include "samewise.checkModels" $ }}{{ end }}
{{- if $.Values.kvEvents.enabled }}{{ include "samewise.checkKvEvents" $ }}{{ end }}
{{- end -}}
{{- end -}}

{{/* Refuses what is for one model, and models that need more memory than the pod gets. */}}
{{- define "samewise.checkModels" -}}
{{- if .Values.kvEvents.enabled }}
  {{- fail "kvEvents: the events of a server with settings.models are not told apart; install a release for each model instead" }}
{{- end }}
{{- if .Values.inferencePool.enabled }}
  {{- fail "inferencePool: a pool serves one model; with settings.models, install a release for each model instead" }}
{{- end }}
{{- if and (ne .Values.autoscaling.type "none") (not .Values.autoscaling.keda.matchers) }}
  {{- fail "autoscaling: with settings.models the load of all models is added up; use keda with autoscaling.keda.matchers for one model_name, or set replicas" }}
{{- end }}
{{- $limit := dig "limits" "memory" "" .Values.resources | toString }}
{{- $units := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "k" 1000.0 "M" 1000000.0 "G" 1000000000.0 "T" 1000000000000.0 "" 1.0 }}
{{- $unit := regexFind "[a-zA-Z]*$" $limit }}
{{- if and $limit .Values.settings.memory_gib (hasKey $units $unit) }}
  {{- $gib := divf (mulf (trimSuffix $unit $limit | float64) (get $units $unit)) 1073741824.0 }}
  {{- if gt (addf .Values.settings.memory_gib 0.5) $gib }}
    {{- fail (printf "settings.memory_gib: %v GiB for models and 0.5 GiB for the server do not fit into resources.limits.memory (%s)" .Values.settings.memory_gib $limit) }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "samewise.checkKvEvents" -}}
{{- if not (include "samewise.modelName" .) }}
  {{- fail "kvEvents: routers identify a model by its name; set settings.served_model_name" }}
{{- end }}
{{- if .Values.settings.isolate_keys }}
  {{- fail "kvEvents is useless with settings.isolate_keys, because no prefix is shared; turn one of them off" }}
{{- end }}
{{- if eq (toString .Values.settings.prefix_caching) "false" }}
  {{- fail "kvEvents needs settings.prefix_caching" }}
{{- end }}
{{- $ports := list 8000 (int .Values.kvEvents.port) (int (default 0 .Values.kvEvents.replayPort)) }}
{{- if ne (len (uniq $ports)) 3 }}
  {{- fail "kvEvents.port and kvEvents.replayPort must differ from each other and from 8000, the API's port" }}
{{- end }}
{{- end -}}

{{/* Refuses settings as variables: the chart reads them from values to derive ports, labels and grace periods. */}}
{{- define "samewise.checkVariables" -}}
{{- $ofTheChart := dict "CONFIG" "settings" "CACHE" "cache" "PORT" "service.port" "API_KEYS_FILE" "apiKeys" "REDIS_URL" "redis" "SSL_CERTFILE" "ingress.tlsSecret" "SSL_KEYFILE" "ingress.tlsSecret" "SSL_KEYFILE_PASSWORD" "ingress.tlsSecret" "DATA_DIR" "data" "KV_EVENTS" "kvEvents" "KV_EVENTS_REPLAY" "kvEvents.replayPort" "KV_EVENTS_TOPIC" "settings.served_model_name" -}}
{{- range .Values.extraEnv }}
{{- $name := upper .name }}
{{- if and (hasPrefix "SAMEWISE_" $name) (not (has $name (list "SAMEWISE_API_KEY" "SAMEWISE_HUB_TOKEN"))) }}
  {{- $setting := trimPrefix "SAMEWISE_" $name }}
  {{- $instead := default (printf "settings.%s" (lower $setting)) (get $ofTheChart $setting) }}
  {{- fail (printf "extraEnv: %s would override the chart's value; set %s instead" .name $instead) }}
{{- end }}
{{- if and (eq .name "POD_IP") $.Values.kvEvents.enabled }}
  {{- fail "extraEnv: POD_IP is reserved for the pod's address with kvEvents; choose another name" }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "samewise.checkLabels" -}}
{{- $own := include "samewise.podLabels" . | fromYaml -}}
{{- range $name, $_ := .Values.podLabels }}
{{- if hasKey $own $name }}
  {{- fail (printf "podLabels: %s is set by the chart; remove it" $name) }}
{{- end }}
{{- end }}
{{- range $value, $labels := dict "serviceMonitor" .Values.serviceMonitor.labels "prometheusRule" .Values.prometheusRule.labels }}
{{- range $name, $_ := $labels }}
{{- if hasKey (include "samewise.labels" $ | fromYaml) $name }}
  {{- fail (printf "%s.labels: %s is set by the chart; remove it" $value $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
