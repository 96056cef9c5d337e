{{- /* Each takes a dict: root ($), name, image and args of the part, part (its values), file (of its
       configuration), and secret (which has that file; default: of the same name as the part). */}}

{{- define "nodepool.selector" -}}
app.kubernetes.io/name: nodepool
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "nodepool.metadata" -}}
{{- if gt (len .root.Release.Name) 40 }}
{{- fail "the name of the release is longer than 40 characters: Kubernetes could not name its pods" }}
{{- end -}}
name: {{ .root.Release.Name }}-{{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "nodepool.selector" . | nindent 2 }}
{{- end }}

{{- define "nodepool.image" -}}
image: {{ printf "%s/nodepool-%s:%s" .root.Values.image.registry .image (.root.Values.image.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- with .args }}
args:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .part.resources | nindent 2 }}
{{- end }}

{{- define "nodepool.pod" -}}
automountServiceAccountToken: {{ if .part.serviceAccountName }}true{{ else }}false{{ end }}
{{- with .part.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "nodepool.unprivileged" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "nodepool.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "nodepool.mounts" -}}
- {name: configuration, mountPath: /etc/nodepool, readOnly: true}
{{- if eq .file "nodepool.yaml" }}
{{- with .root.Values.tlsSecret }}
- {name: tls, mountPath: /etc/zookeeper-tls, readOnly: true}
{{- end }}
{{- end }}
{{- with .part.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "nodepool.volumes" -}}
- name: configuration
  secret:
    secretName: {{ .secret | default (printf "%s-%s" .root.Release.Name .name) }}
    items: [{key: {{ .file }}, path: {{ .file }}}]
{{- if eq .file "nodepool.yaml" }}
{{- with .root.Values.tlsSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- with .part.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* A secret for each file: hosts of slivers get no access to nodepool.yaml, and a key that was
       removed from stringData would stay in the cluster. Also text: the content. */}}
{{- define "nodepool.secret" -}}
apiVersion: v1
kind: Secret
metadata:
  {{- include "nodepool.metadata" . | nindent 2 }}
type: Opaque
stringData:
  {{ .file }}: |
    {{- toYaml .text | nindent 4 }}
{{- end }}

{{- define "nodepool.claim" -}}
- metadata:
    name: state
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .part.storage.className }}
    storageClassName: {{ . }}
    {{- end }}
    resources: {requests: {storage: {{ .part.storage.size }}}}
{{- end }}
