{{/* Name of the release's objects; short enough for suffixes and for the revision label of a StatefulSet's pods. */}}
{{- define "samewise.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "samewise.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "samewise.labels" -}}
{{ include "samewise.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "samewise.podLabels" -}}
{{ include "samewise.labels" . }}
{{- /* Endpoint pickers derive the metrics' names from these labels. */}}
llm-d.ai/engine-type: {{ include "samewise.metricsPrefix" . | quote }}
inference.networking.k8s.io/engine-type: {{ include "samewise.metricsPrefix" . | quote }}
{{- end -}}

{{- define "samewise.kind" -}}
{{ .Values.data.enabled | ternary "StatefulSet" "Deployment" }}
{{- end -}}

{{/* "true" if there may be several replicas, otherwise empty. */}}
{{- define "samewise.severalReplicas" -}}
{{- $most := eq .Values.autoscaling.type "none" | ternary .Values.replicas .Values.autoscaling.maxReplicas -}}
{{- if gt (int $most) 1 }}true{{ end -}}
{{- end -}}

{{/* "true" if apiKeys is set, otherwise empty. */}}
{{- define "samewise.hasKeys" -}}
{{- if or .Values.apiKeys.existingSecret .Values.apiKeys.keys }}true{{ end -}}
{{- end -}}

{{/* "true" if requests need no key, otherwise empty. */}}
{{- define "samewise.isOpen" -}}
{{- $hasKey := include "samewise.hasKeys" . -}}
{{- range .Values.extraEnv }}{{ if eq (upper .name) "SAMEWISE_API_KEY" }}{{ $hasKey = "true" }}{{ end }}{{ end -}}
{{- if not $hasKey }}true{{ end -}}
{{- end -}}

{{- define "samewise.keysSecret" -}}
{{ default (printf "%s-api-keys" (include "samewise.fullname" .)) .Values.apiKeys.existingSecret }}
{{- end -}}

{{- define "samewise.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* Prefix of the server's metrics. */}}
{{- define "samewise.metricsPrefix" -}}
{{ default "samewise" .Values.settings.metrics_prefix }}
{{- end -}}

{{/* Content of the settings file: the settings from the values, and those that follow from other values. */}}
{{- define "samewise.settings" -}}
{{- $own := dict "port" 8000 -}}
{{- if .Values.gpu.enabled }}{{ $_ := set $own "device" "cuda" }}{{ end -}}
{{- if .Values.data.enabled }}{{ $_ := set $own "data_dir" "/data" }}{{ end -}}
{{- if include "samewise.hasKeys" . }}{{ $_ := set $own "api_keys_file" "/etc/samewise/keys/keys" }}{{ end -}}
{{- if and (include "samewise.isOpen" .) (not (hasKey .Values.settings "allowed_hosts")) -}}
{{- $_ := set $own "allowed_hosts" (include "samewise.ownHosts" . | fromYamlArray) -}}
{{- end -}}
{{ merge $own (omit .Values.settings "host") | toYaml }}
{{- end -}}

{{/* List of host names that lead to the server; all names if an httpRoute has no hostnames. */}}
{{- define "samewise.ownHosts" -}}
- {{ printf "%s.%s" (include "samewise.fullname" .) .Release.Namespace | quote }}
- {{ printf "*.%s.svc" .Release.Namespace | quote }}
{{- if .Values.ingress.enabled }}
- {{ .Values.ingress.host | quote }}
{{- end }}
{{- if .Values.httpRoute.enabled }}
{{- range default (list "*") .Values.httpRoute.hostnames }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The pod's grace period in whole seconds: preStop wait, drain, and time to end the processes. */}}
{{- define "samewise.gracePeriod" -}}
{{ add .Values.preStopSeconds (ceil .Values.settings.drain_grace_s | int) 10 }}
{{- end -}}

{{/* Maximum choices in flight in a replica: the setting, or the server's default. */}}
{{- define "samewise.maxNumSeqs" -}}
{{- $cuda := or .Values.gpu.enabled (eq (toString .Values.settings.device) "cuda") -}}
{{ default ($cuda | ternary 256 64) .Values.settings.max_num_seqs | int }}
{{- end -}}

{{/* Port of the traces' collector: from its URL, or the default of the URL's scheme. */}}
{{- define "samewise.collectorPort" -}}
{{- $url := urlParse .Values.settings.otlp_traces_endpoint -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{ default (eq (lower $url.scheme) "https" | ternary 443 80) $port }}
{{- end -}}

{{/* The first name of the model in the API. */}}
{{- define "samewise.modelName" -}}
{{- $names := .Values.settings.served_model_name -}}
{{- if kindIs "string" $names }}{{ splitList "," $names | first }}{{ else if $names }}{{ first $names }}{{ end -}}
{{- end -}}

{{/* Spec of a claim for cache or data. */}}
{{- define "samewise.claimSpec" -}}
accessModes: {{ toJson .accessModes }}
{{- with .storageClassName }}
storageClassName: {{ . | quote }}
{{- end }}
resources: { requests: { storage: {{ .size | quote }} } }
{{- end -}}
