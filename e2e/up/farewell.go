package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/e2e/demo"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// userContext and adminContext are the names of the saved logins of the user and of the operator.
const userContext, adminContext = "make-up", "make-up-admin"

// contexts returns the saved logins of the cloud with the given tokens, or nil if the process has no home directory.
func (c *cloud) contexts(admin, user string) (*demo.Contexts, error) {
	if os.Getenv("HOME") == "" && os.Getenv("XDG_CONFIG_HOME") == "" {
		return nil, nil
	}
	path, err := account.Path(os.Getenv)
	return &demo.Contexts{Path: path, Members: c.addresses(), Tokens: map[string]string{userContext: user, adminContext: admin}, First: userContext}, err
}

// addresses returns the addresses of the members in the order of their IDs.
func (c *cloud) addresses() (all []string) {
	for _, id := range slices.Sorted(maps.Keys(c.trio.Members)) {
		all = append(all, c.trio.Members[id])
	}
	return all
}

// relative returns a path relative to the working directory.
func relative(path string) string {
	if wd, err := os.Getwd(); err == nil {
		if r, err := filepath.Rel(wd, path); err == nil {
			return r
		}
	}
	return path
}

// printed is the text that farewell prints.
var printed = template.Must(template.New("").Parse(`
Your cloud runs; this took {{.Seconds}} s.

  user            {{.User}}: role project:member in default/default, password in {{.Password}}, token in {{.Token}}
  operator        admin: role system:admin, token in {{.Admin}}

{{.Note}}

{{.Ports}}
  agent's metrics http://{{.Metrics}}/metrics
  logs            {{.Logs}}

The other members, 127.0.0.2 and 127.0.0.3, serve the same ports.

Try:

  bin/trivet{{.AsUser}} vm list
  bin/trivet{{.AsUser}} vm log -f {{.VM}}
  bin/trivet{{.AsAdmin}} host list
{{- if .Address}}
  curl -s http://{{.Address}}/          # the VM's own web server
{{- end}}
  curl -s -H 'Trivet-Strict: true' -H "Authorization: Bearer $(cat {{.Token}})" http://127.0.0.1:8084/api/v1/vms
  kill -9 $(cut -d' ' -f1 {{.PIDFile}}); bin/trivet{{.AsUser}} vm list
  bin/trivet login --context {{.Context}} --user {{.User}} --password-file {{.Password}} --endpoint {{.Endpoints}}
`))

// farewell saves the logins, unless saved is nil, and prints how to use the cloud. address is that of the VM's web
// server, or empty.
func (c *cloud) farewell(ctx context.Context, saved *demo.Contexts, vm *lab.VM, address string) error {
	endpoints := strings.Join(c.addresses(), ",")
	token, admin := relative(demo.TokenFile(c.dir)), relative(demo.AdminFile(c.dir))
	asUser, asAdmin := " --token-file "+token+" --endpoint "+endpoints, " --token-file "+admin+" --endpoint "+endpoints
	note := "Without HOME, no login is saved."
	if saved != nil {
		current, err := saved.Save(ctx)
		if err == nil {
			asUser, asAdmin = " --context "+userContext, " --context "+adminContext
		}
		switch {
		case err != nil:
			note = "No login is saved: " + err.Error() + "."
		case current:
			asUser = ""
			note = "The current context of trivet is " + userContext + ", the login of " + demo.User + " for a day.\n" +
				"The context " + adminContext + " is the login of the operator."
		default:
			note = "The context " + userContext + " is the login of " + demo.User + " for a day, and " + adminContext + " that of the operator.\n" +
				"Your current context is another one; `bin/trivet context use " + userContext + "` changes that."
		}
	}
	return printed.Execute(os.Stdout, map[string]any{
		"Seconds": fmt.Sprintf("%.0f", time.Since(c.began).Seconds()), "User": demo.User, "Ports": demo.Ports, "Password": relative(demo.PasswordFile(c.dir)),
		"Token": token, "Admin": admin, "Note": note, "Metrics": c.agent.Metrics, "Logs": relative(c.dir.Path("log")), "AsUser": asUser,
		"AsAdmin": asAdmin, "VM": vm.Name, "Address": address, "PIDFile": relative(c.dir.Path("pid", "controlplane-1")),
		"Context": userContext, "Endpoints": endpoints,
	})
}
