{{- define "fathom.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "fathom.selector" -}}
app.kubernetes.io/name: fathom
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "fathom.labels" -}}
app.kubernetes.io/name: fathom
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "fathom.nodes" -}}
{{- $size := int .Values.parallel.tensorSize -}}
{{- $count := int .Values.gpu.count -}}
{{- if le $size (max $count 1) -}}1
{{- else if not $count -}}
{{- fail (printf "parallel.tensorSize %d counts GPUs, and gpu.count is 0" $size) -}}
{{- else if mod $size $count -}}
{{- fail (printf "parallel.tensorSize %d is not a multiple of gpu.count %d" $size $count) -}}
{{- else -}}{{ div $size $count }}
{{- end -}}
{{- end }}

{{- /* Values that would give a server that does not start, or does something else than they say. */}}
{{- define "fathom.check" -}}
{{- $dense := has "--no-gpu-depth-pages" (concat .Values.server.extraArgs .Values.policy.args) -}}
{{- if and (gt (int .Values.gpu.count) 0) $dense -}}
{{- if .Values.model.draft -}}
{{- fail "model.draft cannot be had with --no-gpu-depth-pages on a GPU" -}}
{{- else if ne .Values.policy.preset "exact" -}}
{{- fail (printf "policy.preset %s cannot be had with --no-gpu-depth-pages on a GPU" .Values.policy.preset) -}}
{{- end -}}
{{- end -}}
{{- if .Values.auth.existingSecret -}}
{{- range concat .Values.server.extraArgs .Values.policy.args -}}
{{- if regexMatch "^--config(=|$)" . -}}
{{- fail "auth.existingSecret is the one --config that a server takes: put the other options into its keys.yaml" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $others := 0 -}}
{{- range concat .Values.server.extraArgs .Values.policy.args -}}
{{- if regexMatch "^--(host|port)(=|$)" . -}}
{{- fail (printf "%s: the probes and the Service want all addresses and port 30000 of the pod; server.host and service.port are the values" .) -}}
{{- else if regexMatch "^--(pp-size|pipeline-parallel-size|dp-size|data-parallel-size)(=|$)" . -}}
{{- $others = 1 -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int .Values.gpu.count) (int .Values.parallel.tensorSize)) (not $others) -}}
{{- fail (printf "gpu.count %d is more than parallel.tensorSize %d: a replica uses as many GPUs as the latter says" (int .Values.gpu.count) (int .Values.parallel.tensorSize)) -}}
{{- end -}}
{{- if and .Values.router.enabled (ne .Values.server.host "0.0.0.0") -}}
{{- fail (printf "server.host %s cannot be had with router.enabled: the router listens on IPv4" .Values.server.host) -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas %d is more than autoscaling.maxReplicas %d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $replicas := .Values.autoscaling.enabled | ternary .Values.autoscaling.maxReplicas .Values.replicas -}}
{{- $surge := dig "rollingUpdate" "maxSurge" "25%" .Values.strategy | toString | trimSuffix "%" -}}
{{- if and (eq (include "fathom.nodes" .) "1") (eq .Values.strategy.type "RollingUpdate") (ne $surge "0") -}}
{{- $replicas = add $replicas 1 -}}
{{- end -}}
{{- if and .Values.cache.enabled (not .Values.cache.existingClaim) (not (has "ReadWriteMany" .Values.cache.accessModes)) -}}
{{- if gt (mul (int $replicas) (int (include "fathom.nodes" .))) 1 -}}
{{- fail "several pods share the cache: cache.accessModes needs ReadWriteMany, or cache.existingClaim a claim of your own" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "fathom.args" -}}
- serve
{{- if .Values.model.path }}
- {{ .Values.model.path | quote }}
{{- else }}
- --demo
{{- end }}
- {{ printf "--host=%s" .Values.server.host | quote }}
- --port=30000
{{- with .Values.model.name }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- with .Values.model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- with .Values.model.draft }}
- {{ printf "--draft-model-path=%s" . | quote }}
{{- end }}
- --preset={{ .Values.policy.preset }}
{{- range .Values.policy.args }}
- {{ . | quote }}
{{- end }}
- --max-in-flight={{ int .Values.server.maxInFlight }}
- --max-queued-requests={{ int .Values.server.maxQueuedRequests }}
{{- with .Values.server.maxRunningRequests }}
- --max-running-requests={{ int . }}
{{- end }}
{{- with .Values.server.contextLength }}
- --context-length={{ int . }}
{{- end }}
- --max-body-mib={{ int .Values.server.maxBodyMib }}
- --drain-seconds={{ int .Values.server.drainSeconds }}
{{- if gt (int .Values.parallel.tensorSize) 1 }}
- --tp-size={{ int .Values.parallel.tensorSize }}
{{- end }}
{{- if gt (int (include "fathom.nodes" .)) 1 }}
- --nnodes={{ include "fathom.nodes" . }}
- --node-rank=$(LWS_WORKER_INDEX)
- --dist-init-addr=$(LWS_LEADER_ADDRESS):20000
{{- end }}
{{- if .Values.auth.existingSecret }}
- --config
- /etc/fathom/keys.yaml
{{- end }}
{{- range .Values.server.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- /* A pod that serves. Give dict "root" $ "serves" true for a pod that answers HTTP. */}}
{{- define "fathom.pod" -}}
{{- $ := .root -}}
{{- include "fathom.check" $ -}}
{{- $preStop := int $.Values.preStopSeconds -}}
{{- $drain := int $.Values.server.drainSeconds -}}
serviceAccountName: {{ include "fathom.name" $ }}
{{- with $.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
automountServiceAccountToken: false
{{- with $.Values.gpu.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
# The server's own limits come first: removal from the endpoints, the drain, and 40 s to abort and close.
terminationGracePeriodSeconds: {{ add $preStop $drain 40 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
containers:
  - name: fathom
    image: "{{ $.Values.image.repository }}:{{ $.Values.image.tag }}"
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    args: {{- include "fathom.args" $ | nindent 6 }}
    env:
      - {name: HF_HOME, value: /var/cache/fathom/huggingface}
      {{- with $.Values.model.tokenSecret }}
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
      {{- end }}
      {{- with $.Values.server.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- if .serves }}
    ports:
      - {name: http, containerPort: 30000}
    # /ready: the model is loaded, the first generation was answered, and the server is not ending. It answers at
    # once, whatever the engine does; a process whose seams are not verified ends before it gets here.
    startupProbe:
      httpGet: {path: /ready, port: http}
      periodSeconds: 5
      timeoutSeconds: 3
      failureThreshold: {{ mul (int $.Values.probes.startupMinutes) 12 }}
    readinessProbe:
      httpGet: {path: /ready, port: http}
      periodSeconds: 3
      timeoutSeconds: 3
      failureThreshold: 2
    # /health: the engine made progress within the last 20 s, or answers one token now. While the server ends it is
    # 503 too, which must not cut the drain short: kubelet stops probing a pod that terminates.
    livenessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 30
      timeoutSeconds: 25
      failureThreshold: {{ int $.Values.probes.livenessFailures }}
    {{- end }}
    lifecycle:
      preStop:
        # Until every node has dropped the serving pod from its endpoints; then SIGTERM starts its drain, in which it
        # still computes with the other pods of its group.
        sleep: {seconds: {{ .serves | ternary $preStop (add $preStop $drain) }}}
    resources:
      requests:
        {{- toYaml $.Values.resources.requests | nindent 8 }}
      limits:
        {{- toYaml $.Values.resources.limits | nindent 8 }}
        {{- if int $.Values.gpu.count }}
        {{ $.Values.gpu.resource }}: {{ int $.Values.gpu.count }}
        {{- end }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    volumeMounts:
      - {name: cache, mountPath: /var/cache/fathom}
      - {name: home, mountPath: /home/fathom}
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      {{- if $.Values.auth.existingSecret }}
      - {name: keys, mountPath: /etc/fathom, readOnly: true}
      {{- end }}
volumes:
  - name: cache
    {{- if $.Values.cache.enabled }}
    persistentVolumeClaim: {claimName: {{ $.Values.cache.existingClaim | default (printf "%s-cache" (include "fathom.name" $)) }}}
    {{- else }}
    emptyDir: {}
    {{- end }}
  - {name: home, emptyDir: {}}
  - {name: tmp, emptyDir: {}}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $.Values.sharedMemory }}}
  {{- with $.Values.auth.existingSecret }}
  - name: keys
    secret: {secretName: {{ . }}, items: [{key: keys.yaml, path: keys.yaml}]}
  {{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $.Values $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
