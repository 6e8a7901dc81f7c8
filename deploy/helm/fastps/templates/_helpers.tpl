{{/* Name of the StatefulSet. Shards are NAME-0, NAME-1 and so on: a name has at most 63 characters. */}}
{{- define "fastps.name" -}}
{{- $name := ternary .Release.Name (printf "%s-fastps" .Release.Name) (contains "fastps" .Release.Name) -}}
{{- trunc 50 $name | trimSuffix "-" -}}
{{- end }}

{{- define "fastps.selector" -}}
app.kubernetes.io/name: fastps
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fastps.labels" -}}
{{ include "fastps.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Addresses of all shards, in order: those of the service of each shard, which outlives its pods. */}}
{{- define "fastps.addresses" -}}
{{- $addresses := list -}}
{{- range $shard := until (int .Values.shards) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s.svc:7070" (include "fastps.name" $) $shard $.Release.Namespace) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}

{{/* A probe of /readyz or /healthz where the pod network reaches it, else of the port. */}}
{{- define "fastps.httpOrTcp" -}}
{{- if .web }}
httpGet:
  path: {{ .path }}
  port: web
  {{- if .tls }}
  scheme: HTTPS
  {{- end }}
{{- else }}
tcpSocket:
  port: grpc
{{- end }}
{{- end }}

{{/* Fails where a server would refuse to start. */}}
{{- define "fastps.check" -}}
{{- if not (or .Values.tls.secret .Values.insecure) -}}
{{- fail "without TLS everyone in the network can read and change the parameters: set tls.secret, or insecure=true in a network that you trust" -}}
{{- end -}}
{{- if and .Values.tls.secret (not (or .Values.tokens.secret .Values.tls.clientCertificates .Values.insecure)) -}}
{{- fail "with TLS alone everyone in the network can read and change the parameters: set tokens.secret, tls.clientCertificates=true, or insecure=true in a network that you trust" -}}
{{- end -}}
{{- if and .Values.tokens.secret (not .Values.tls.secret) -}}
{{- fail "tokens.secret needs tls.secret: clients send a token only over TLS" -}}
{{- end -}}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) -}}
{{- fail "tls.clientCertificates needs tls.secret" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (not .Values.web.enabled) -}}
{{- fail "serviceMonitor.enabled needs web.enabled: by default metrics are on loopback" -}}
{{- end -}}
{{- end }}
