{{- define "dledger.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "dledger.secret" -}}
{{- .Values.peers.existingSecret | default (printf "%s-peers" (include "dledger.name" .)) -}}
{{- end -}}

{{- define "dledger.labels" -}}
app.kubernetes.io/name: dledger
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- /* Addresses that stay the same when a pod moves. */ -}}
{{- define "dledger.namesrvs" -}}
{{- $root := . -}}
{{- $name := include "dledger.name" . -}}
{{- range $i := until (int .Values.namesrv.replicas) -}}
{{- if $i }};{{ end -}}
{{ $name }}-namesrv-{{ $i }}.{{ $name }}-namesrv.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:{{ $root.Values.namesrv.port }}
{{- end -}}
{{- end -}}

{{- define "dledger.peers" -}}
{{- $root := . -}}
{{- $name := include "dledger.name" . -}}
{{- range $i := until (int .Values.broker.replicas) -}}
{{- if $i }};{{ end -}}
n{{ $i }}-{{ $name }}-broker-{{ $i }}.{{ $name }}-broker.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:{{ $root.Values.broker.peerPort }}
{{- end -}}
{{- end -}}

{{- define "dledger.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "dledger.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end -}}
