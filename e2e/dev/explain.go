package main

import (
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/trivet-cloud/trivet/e2e/demo"
)

// explanation is the text that explain prints.
var explanation = template.Must(template.New("").Parse(`Your cloud runs until you press Ctrl-C.

  user            {{.User}}: role project:member in default/default, password in {{.Password}}, token in {{.Token}}
  operator        admin: role system:admin, token in {{.Admin}}
  host            {{if .Why}}none, because {{.Why}}{{else}}devhost{{end}}

{{.Ports}}
{{- if not .Why}}
  agent's metrics http://{{.Metrics}}/metrics
{{- end}}
  logs            {{.Logs}}

In another terminal:

  export TRIVET_ENDPOINT=127.0.0.1 TRIVET_TOKEN_FILE={{.Token}}

Try:

  {{.CLI}} whoami
  {{.CLI}} kv put greeting hello
  {{.CLI}} kv get greeting
{{- if not .Why}}
  {{.CLI}} vm create web --disk 1{{if .Image}} --image {{.Image}}{{end}} --start
  {{.CLI}} vm list
{{- if .Image}}
  {{.CLI}} vm log web
{{- end}}
{{- end}}
  {{.CLI}} --token-file {{.Admin}} host list
  {{.CLI}} --token-file {{.Admin}} version
{{if not .Why}}
With access to the Internet, an operator gets an image of Debian for all projects:

  {{.CLI}} --token-file {{.Admin}} image catalog import debian-12 --public
{{end}}`))

// explain prints how to use the cloud. why is the reason for which there is no host, or empty.
func (c *cloud) explain(why string) error {
	image := ""
	if c.guest != "" && why == "" {
		image = "small"
	}
	return explanation.Execute(os.Stdout, map[string]any{
		"User": demo.User, "Ports": demo.Ports, "Password": demo.PasswordFile(c.dir), "Token": demo.TokenFile(c.dir), "Admin": demo.AdminFile(c.dir), "Why": why,
		"Metrics": c.agent.Metrics, "Logs": c.dir.Path("log"), "CLI": shortest(c.trio.Bin.CLI), "Image": image,
	})
}

// shortest returns a path of a program that works in the working directory: its name, if the shell finds it in PATH, or
// its path relative to the working directory, or else its absolute path.
func shortest(program string) string {
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if dir == filepath.Dir(program) {
			return filepath.Base(program)
		}
	}
	if wd, err := os.Getwd(); err == nil {
		if path, err := filepath.Rel(wd, program); err == nil && !strings.HasPrefix(path, "..") {
			return path
		}
	}
	return program
}
