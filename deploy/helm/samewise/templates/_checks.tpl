{{/* Values that do not go together end the rendering, with one line that says why. Types and names are the schema's. */}}
{{- define "samewise.checks" -}}
{{- $several := include "samewise.severalReplicas" . -}}
{{- $isDeployment := eq (include "samewise.kind" .) "Deployment" -}}
{{- $hasKeys := include "samewise.hasKeys" . -}}
{{- include "samewise.checkSettings" . -}}
{{- include "samewise.checkVariables" . -}}
{{- include "samewise.checkLabels" . -}}
{{- with .Values -}}
{{- if and (ne .autoscaling.type "none") (not (kindIs "invalid" .replicas)) }}
  {{- fail "replicas: leave it out, autoscaling decides on it between minReplicas and maxReplicas" }}
{{- end }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
  {{- fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" }}
{{- end }}
{{- if not (or .autoscaling.waitingPerReplica .autoscaling.runningPerReplica) }}
  {{- fail "autoscaling needs waitingPerReplica, runningPerReplica or both" }}
{{- end }}
{{- if and (eq .autoscaling.type "keda") (not .autoscaling.keda.prometheusAddress) }}
  {{- fail "autoscaling.keda.prometheusAddress is needed, such as http://prometheus.monitoring:9090" }}
{{- end }}
{{- if and (ne .autoscaling.type "none") .data.enabled }}
  {{- fail "data.enabled: autoscaling would end replicas with the files, batches and responses that only they have; set replicas instead" }}
{{- end }}
{{- $running := .autoscaling.runningPerReplica }}
{{- $atMost := int (include "samewise.maxNumSeqs" $) }}
{{- if and (ne .autoscaling.type "none") $running (ge (int $running) $atMost) }}
  {{- fail (printf "autoscaling.runningPerReplica: a replica runs %d at most (settings.max_num_seqs), so more than %v are never reached; set it lower, or null" $atMost $running) }}
{{- end }}
{{- if and $several $isDeployment .cache.persistent (not (has "ReadWriteMany" .cache.accessModes)) }}
  {{- fail "cache.persistent: several replicas of a Deployment share one claim, so cache.accessModes needs ReadWriteMany; or leave the cache in each pod, or enable data for a claim each" }}
{{- end }}
{{- if and .cache.existingClaim (not .cache.persistent) }}
  {{- fail "cache.existingClaim needs cache.persistent" }}
{{- end }}
{{- if and .data.existingClaim (not .data.enabled) }}
  {{- fail "data.existingClaim needs data.enabled" }}
{{- end }}
{{- if and $several .data.existingClaim }}
  {{- fail "data.existingClaim: two servers must not share a data folder; leave it out, and each replica gets a claim of its own" }}
{{- end }}
{{- if and .apiKeys.existingSecret .apiKeys.keys }}
  {{- fail "apiKeys: give existingSecret or keys, not both" }}
{{- end }}
{{- if and .redis.existingSecret (not $hasKeys) }}
  {{- fail "redis: limits that replicas share need apiKeys" }}
{{- end }}
{{- if and .kvEvents.enabled .networkPolicy.enabled (not .networkPolicy.kvEventsFrom) }}
  {{- fail "networkPolicy.kvEventsFrom is needed with kvEvents: they show the tokens of prompts, so name the routers that may read them" }}
{{- end }}
{{- if not (or (include "samewise.isOpen" $) .settings.open_metrics) }}
{{- if and .serviceMonitor.enabled (not .serviceMonitor.existingSecret) }}
  {{- fail "serviceMonitor.existingSecret is needed: /metrics wants a key where there are keys, unless settings.open_metrics is true" }}
{{- end }}
{{- if .inferencePool.enabled }}
  {{- fail "inferencePool: endpoint pickers have no key for /metrics; set settings.open_metrics" }}
{{- end }}
{{- end }}
{{- if and .inferencePool.enabled (not .inferencePool.endpointPicker.name) }}
  {{- fail "inferencePool.endpointPicker.name is needed: the Service of the endpoint picker" }}
{{- end }}
{{- if and .ingress.enabled (not .ingress.host) }}
  {{- fail "ingress.host is needed" }}
{{- end }}
{{- if and .httpRoute.enabled (not .httpRoute.parentRefs) }}
  {{- fail "httpRoute.parentRefs is needed: the Gateway that routes" }}
{{- end }}
{{- end -}}
{{- end -}}
