{{/* The pod's template, for the Deployment and the StatefulSet. */}}
{{- define "samewise.pod" -}}
metadata:
  annotations:
    checksum/settings: {{ include "samewise.settings" . | sha256sum | quote }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- include "samewise.podLabels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  enableServiceLinks: false # a Service named samewise would set SAMEWISE_PORT to tcp://...
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ include "samewise.gracePeriod" . }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001 # makes volumes writable
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: { type: RuntimeDefault }
  {{- with .Values.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $selector := dict "labelSelector" (dict "matchLabels" (include "samewise.selectorLabels" $ | fromYaml)) }}
    {{- range . }}
    - {{- hasKey . "labelSelector" | ternary . (merge (deepCopy .) $selector) | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  initContainers:
    # Links the image's kernels and embedded model into the cache, which is on a volume for converted models and learnt
    # heads.
    - name: link-cache
      {{- include "samewise.container" . | nindent 6 }}
      command:
        - sh
        - -euc
        - |
          cache=/var/lib/samewise/cache
          mkdir -p "$cache/hashes"
          for made in "$SAMEWISE_CACHE"/* "$SAMEWISE_CACHE"/hashes/*; do
            [ -e "$made" ] || continue
            link=$cache/${made#"$SAMEWISE_CACHE"/}
            # Names depend on the content, so an existing link is right; another replica may create it at the same time.
            [ -e "$link" ] || [ -L "$link" ] || ln -s "$made" "$link" || [ -L "$link" ]
          done
      resources:
        requests: { cpu: 100m, memory: 64Mi }
        limits: { cpu: 100m, memory: 64Mi }
      volumeMounts:
        - { name: cache, mountPath: /var/lib/samewise }
  containers:
    - name: samewise
      {{- include "samewise.container" . | nindent 6 }}
      ports:
        - { name: http, containerPort: 8000 }
        {{- if .Values.kvEvents.enabled }}
        - { name: kv-events, containerPort: {{ .Values.kvEvents.port }} }
        {{- with .Values.kvEvents.replayPort }}
        - { name: kv-replay, containerPort: {{ . }} }
        {{- end }}
        {{- end }}
      env: {{- include "samewise.environment" . | nindent 8 }}
      startupProbe:
        httpGet: { path: /ready, port: http }
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ divf .Values.startupTimeoutSeconds 5 | ceil | int }}
      readinessProbe: { httpGet: { path: /ready, port: http }, periodSeconds: 5, timeoutSeconds: 5 }
      livenessProbe: { httpGet: { path: /health, port: http }, periodSeconds: 10, timeoutSeconds: 5 }
      {{- with .Values.preStopSeconds }}
      lifecycle: { preStop: { exec: { command: [sleep, {{ . | quote }}] } } }
      {{- end }}
      resources: {{- include "samewise.resources" . | nindent 8 }}
      volumeMounts:
        - { name: settings, mountPath: /etc/samewise/settings, readOnly: true }
        {{- if include "samewise.hasKeys" . }}
        - { name: keys, mountPath: /etc/samewise/keys, readOnly: true } # mounted as a folder, because a single file would not be updated
        {{- end }}
        - { name: cache, mountPath: /var/lib/samewise }
        - { name: tmp, mountPath: /tmp }
        {{- if .Values.data.enabled }}
        - { name: data, mountPath: /data }
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes: {{- include "samewise.volumes" . | nindent 4 }}
{{- end -}}

{{- define "samewise.container" -}}
image: {{ include "samewise.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end -}}

{{/* Variables that cannot be in the settings file: its path, secrets, and values that only the pod knows. */}}
{{- define "samewise.environment" -}}
- { name: SAMEWISE_CONFIG, value: /etc/samewise/settings/settings.yaml }
- { name: SAMEWISE_CACHE, value: /var/lib/samewise/cache }
- { name: SAMEWISE_HOST, value: {{ default "0.0.0.0" .Values.settings.host | quote }} } # in the file it would lose to the image's
{{- with .Values.redis.existingSecret }}
- name: SAMEWISE_REDIS_URL
  valueFrom: { secretKeyRef: { name: {{ . | quote }}, key: {{ $.Values.redis.secretKey | quote }} } }
{{- end }}
{{- with .Values.kvEvents }}
{{- if .enabled }}
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- { name: SAMEWISE_KV_EVENTS, value: {{ printf "tcp://*:%v" .port | quote }} }
- { name: SAMEWISE_KV_EVENTS_TOPIC, value: {{ printf "kv@$(POD_IP):8000@%s" (include "samewise.modelName" $) | quote }} }
{{- with .replayPort }}
- { name: SAMEWISE_KV_EVENTS_REPLAY, value: {{ printf "tcp://*:%v" . | quote }} }
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "samewise.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if .Values.gpu.enabled -}}
{{- $resources = merge $resources (dict "limits" (dict .Values.gpu.resource 1)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{- define "samewise.volumes" -}}
- name: settings
  configMap: { name: {{ include "samewise.fullname" . }}-settings }
{{- if include "samewise.hasKeys" . }}
- name: keys
  secret:
    secretName: {{ include "samewise.keysSecret" . | quote }}
    defaultMode: 0440
    items: [{ key: {{ empty .Values.apiKeys.existingSecret | ternary "keys" .Values.apiKeys.secretKey | quote }}, path: keys }]
{{- end }}
- name: tmp
  emptyDir: {}
{{- if not .Values.cache.persistent }}
- name: cache
  emptyDir: { sizeLimit: {{ .Values.cache.size | quote }} }
{{- else if .Values.cache.existingClaim }}
- name: cache
  persistentVolumeClaim: { claimName: {{ .Values.cache.existingClaim | quote }} }
{{- else if eq (include "samewise.kind" .) "Deployment" }}
- name: cache
  persistentVolumeClaim: { claimName: {{ include "samewise.fullname" . }}-cache }
{{- end }}
{{- with .Values.data.existingClaim }}
- name: data
  persistentVolumeClaim: { claimName: {{ . | quote }} }
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
