{{- define "outrider.labels" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "outrider.name" -}}
{{ printf "%s-outrider" .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
