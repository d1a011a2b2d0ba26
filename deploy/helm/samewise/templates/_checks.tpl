{{/* Fails with one line if values conflict. Names and types are checked by values.schema.json. */}}
{{- define "samewise.checks" -}}
{{- $several := include "samewise.severalReplicas" . -}}
{{- $isDeployment := eq (include "samewise.kind" .) "Deployment" -}}
{{- $hasKeys := include "samewise.hasKeys" . -}}
{{- include "samewise.checkSettings" . -}}
{{- include "samewise.checkVariables" . -}}
{{- include "samewise.checkLabels" . -}}
{{- with .Values -}}
{{- if and (ne .autoscaling.type "none") (not (kindIs "invalid" .replicas)) }}
  {{- fail "replicas: leave it out with autoscaling, which chooses between minReplicas and maxReplicas" }}
{{- end }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
  {{- fail "autoscaling.minReplicas must not exceed autoscaling.maxReplicas" }}
{{- end }}
{{- if not (or .autoscaling.waitingPerReplica .autoscaling.runningPerReplica) }}
  {{- fail "autoscaling needs waitingPerReplica, runningPerReplica or both" }}
{{- end }}
{{- if and (eq .autoscaling.type "keda") (not .autoscaling.keda.prometheusAddress) }}
  {{- fail "autoscaling.keda.prometheusAddress is needed, for example http://prometheus.monitoring:9090" }}
{{- end }}
{{- if and (ne .autoscaling.type "none") .data.enabled }}
  {{- fail "data.enabled: autoscaling would remove replicas and lose the files, batches and responses stored there; set replicas instead" }}
{{- end }}
{{- $running := .autoscaling.runningPerReplica }}
{{- $atMost := int (include "samewise.maxNumSeqs" $) }}
{{- if and (ne .autoscaling.type "none") $running (ge (int $running) $atMost) }}
  {{- fail (printf "autoscaling.runningPerReplica: a replica runs at most %d choices (settings.max_num_seqs), so %v is never exceeded; set it lower, or null" $atMost $running) }}
{{- end }}
{{- if and $several $isDeployment .cache.persistent (not (has "ReadWriteMany" .cache.accessModes)) }}
  {{- fail "cache.persistent: several replicas of a Deployment share one claim, so cache.accessModes needs ReadWriteMany; or turn cache.persistent off, or enable data to have a claim per replica" }}
{{- end }}
{{- if and .cache.existingClaim (not .cache.persistent) }}
  {{- fail "cache.existingClaim needs cache.persistent" }}
{{- end }}
{{- if and .data.existingClaim (not .data.enabled) }}
  {{- fail "data.existingClaim needs data.enabled" }}
{{- end }}
{{- if and $several .data.existingClaim }}
  {{- fail "data.existingClaim: several replicas cannot share a data folder; leave it out, and each replica gets its own claim" }}
{{- end }}
{{- if and .apiKeys.existingSecret .apiKeys.keys }}
  {{- fail "apiKeys: give existingSecret or keys, not both" }}
{{- end }}
{{- if and .redis.existingSecret (not $hasKeys) }}
  {{- fail "redis: shared limits need apiKeys" }}
{{- end }}
{{- if and .kvEvents.enabled .networkPolicy.enabled (not .networkPolicy.kvEventsFrom) }}
  {{- fail "networkPolicy.kvEventsFrom is needed with kvEvents: the events contain the tokens of prompts, so name the routers that may read them" }}
{{- end }}
{{- if not (or (include "samewise.isOpen" $) .settings.open_metrics) }}
{{- if and .serviceMonitor.enabled (not .serviceMonitor.existingSecret) }}
  {{- fail "serviceMonitor.existingSecret is needed: /metrics requires a key; or set settings.open_metrics" }}
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
  {{- fail "httpRoute.parentRefs is needed: the Gateway to attach to" }}
{{- end }}
{{- end -}}
{{- end -}}
