{{/* Of the server's settings, those that would leave the chart and the server at odds; the server checks the rest. */}}
{{- define "samewise.checkSettings" -}}
{{- with .Values.settings -}}
{{- if and .isolate_keys (not (include "samewise.hasKeys" $)) }}
  {{- fail "settings.isolate_keys needs apiKeys" }}
{{- end }}
{{- if and $.Values.gpu.enabled (has .device (list "auto" "cpu")) }}
  {{- fail "gpu.enabled: settings.device is cuda then; leave it out" }}
{{- end }}
{{- if and (hasKey . "host") (not (has .host (list "0.0.0.0" "::"))) }}
  {{- fail "settings.host: pods are reached at their own addresses; leave it out, or have :: in a cluster with IPv6 alone" }}
{{- end }}
{{- if and (hasKey . "metrics_prefix") (not (regexMatch "^[a-zA-Z]([a-zA-Z0-9_]{0,61}[a-zA-Z0-9])?$" .metrics_prefix)) }}
  {{- fail (printf "settings.metrics_prefix: %q is to be a label of the pods, too: 1 to 63 letters, digits and _, with a letter first and no _ at the end" .metrics_prefix) }}
{{- end }}
{{- if and .otlp_traces_endpoint (not (regexMatch "^https?://[^/]" (lower .otlp_traces_endpoint))) }}
  {{- fail (printf "settings.otlp_traces_endpoint: %q is no URL of a collector, such as http://collector.monitoring:4318" .otlp_traces_endpoint) }}
{{- end }}
{{- if $.Values.kvEvents.enabled }}{{ include "samewise.checkKvEvents" $ }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "samewise.checkKvEvents" -}}
{{- if not (include "samewise.modelName" .) }}
  {{- fail "kvEvents: routers know a model by its name; set settings.served_model_name" }}
{{- end }}
{{- if .Values.settings.isolate_keys }}
  {{- fail "kvEvents has nothing to tell with settings.isolate_keys: no prefix is shared" }}
{{- end }}
{{- if eq (toString .Values.settings.prefix_caching) "false" }}
  {{- fail "kvEvents needs settings.prefix_caching" }}
{{- end }}
{{- $ports := list 8000 (int .Values.kvEvents.port) (int (default 0 .Values.kvEvents.replayPort)) }}
{{- if ne (len (uniq $ports)) 3 }}
  {{- fail "kvEvents.port and kvEvents.replayPort have to differ, and 8000 is the API's" }}
{{- end }}
{{- end -}}

{{/* A setting stands in one place, for the chart reads it there: ports, labels and grace periods follow from it. */}}
{{- define "samewise.checkVariables" -}}
{{- $ofTheChart := dict "CONFIG" "settings" "CACHE" "cache" "PORT" "service.port" "API_KEYS_FILE" "apiKeys" "REDIS_URL" "redis" "DATA_DIR" "data" "KV_EVENTS" "kvEvents" "KV_EVENTS_REPLAY" "kvEvents.replayPort" "KV_EVENTS_TOPIC" "settings.served_model_name" -}}
{{- range .Values.extraEnv }}
{{- $name := upper .name }}
{{- if and (hasPrefix "SAMEWISE_" $name) (ne $name "SAMEWISE_API_KEY") }}
  {{- $setting := trimPrefix "SAMEWISE_" $name }}
  {{- $instead := default (printf "settings.%s" (lower $setting)) (get $ofTheChart $setting) }}
  {{- fail (printf "extraEnv: %s would go before what the chart knows; set %s instead" .name $instead) }}
{{- end }}
{{- if and (eq .name "POD_IP") $.Values.kvEvents.enabled }}
  {{- fail "extraEnv: POD_IP is the pod's address with kvEvents; name yours otherwise" }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "samewise.checkLabels" -}}
{{- $own := include "samewise.podLabels" . | fromYaml -}}
{{- range $name, $_ := .Values.podLabels }}
{{- if hasKey $own $name }}
  {{- fail (printf "podLabels: %s is a label of the chart's own" $name) }}
{{- end }}
{{- end }}
{{- range $value, $labels := dict "serviceMonitor" .Values.serviceMonitor.labels "prometheusRule" .Values.prometheusRule.labels }}
{{- range $name, $_ := $labels }}
{{- if hasKey (include "samewise.labels" $ | fromYaml) $name }}
  {{- fail (printf "%s.labels: %s is a label of the chart's own" $value $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
