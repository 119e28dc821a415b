// Package shared holds what both binaries must agree on. This file checks the import arrows of the whole module: what is
// not listed is not allowed.
package shared

import (
	"go/build"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/trivet-cloud/trivet/"

// arrows says what each package may import of ours. A value that ends in /… stands for everything below. A service may
// import what stands below it, never upwards.
var arrows = map[string][]string{
	"shared/fault":  {},
	"shared/mutant": {},
	"shared/mtls":   {},
	"shared/qcow2":  {},
	"shared/cloud":  {"shared/fault", "shared/mutant"},
	"shared/wire":   {"shared/cloud", "protos/…"},

	"controlplane/clock":           {"shared/mutant"},
	"controlplane/clusterkey":      {"shared/mtls"},
	"controlplane/certfile":        {"shared/mutant"},
	"controlplane/consensus":       {"shared/mutant"},
	"controlplane/disk":            {},
	"controlplane/mvcc":            {"shared/mutant"},
	"controlplane/auth":            {"shared/cloud", "shared/fault", "shared/mutant"},
	"controlplane/loopback":        {},
	"controlplane/delay":           {},
	"controlplane/rest":            {"controlplane/auth", "controlplane/loopback", "shared/cloud", "shared/fault"},
	"controlplane/rpc":             {"controlplane/auth", "controlplane/delay", "shared/cloud", "shared/fault"},
	"controlplane/rpc/rpctest":     {},
	"controlplane/lead":            {"controlplane/auth", "shared/cloud", "shared/fault"},
	"controlplane/budget":          {"controlplane/auth", "shared/cloud", "shared/fault", "shared/mutant"},
	"controlplane/diskspace":       {"controlplane/auth", "shared/cloud", "shared/fault"},
	"controlplane/schedule":        {"shared/cloud"},
	"controlplane/store":           {"controlplane/consensus", "controlplane/mvcc", "controlplane/lead", "shared/cloud", "shared/fault"},
	"controlplane/store/storetest": {"controlplane/store", "controlplane/mvcc", "shared/cloud", "shared/fault"},
	"controlplane/peer":            {"controlplane/consensus", "controlplane/lead", "protos/peer/v1", "shared/cloud", "shared/fault", "shared/mtls"},

	"controlplane/tenant":             {"controlplane/store", "shared/cloud", "shared/fault"},
	"controlplane/audit":              service(),
	"controlplane/identity":           service("controlplane/clusterkey", "controlplane/delay", "controlplane/tenant", "controlplane/audit", "controlplane/identity/…"),
	"controlplane/identity/token":     {"shared/cloud", "shared/fault", "shared/mutant"},
	"controlplane/identity/password":  {"shared/cloud", "shared/fault"},
	"controlplane/identity/principal": {"controlplane/identity/password", "controlplane/clusterkey", "controlplane/tenant", "controlplane/store", "shared/cloud", "shared/fault"},
	"controlplane/identity/keyring":   {"controlplane/clusterkey", "controlplane/store", "shared/cloud", "shared/fault"},
	"controlplane/identity/outside":   {"shared/cloud", "shared/fault"},
	"controlplane/image":              service("shared/qcow2", "controlplane/tenant"),
	"controlplane/node":               service("controlplane/schedule", "controlplane/peer", "shared/mtls"),
	"controlplane/vm":                 service("controlplane/schedule", "controlplane/node", "controlplane/image", "controlplane/tenant"),
	"controlplane/volume":             service(),
	"controlplane/credit":             service("controlplane/credit/ledger", "controlplane/audit", "controlplane/budget"),
	"controlplane/billing":            service("controlplane/credit", "controlplane/credit/ledger", "controlplane/vm"),
	"controlplane/operator":           service("controlplane/consensus", "controlplane/diskspace", "controlplane/member", "controlplane/backup", "controlplane/invite", "controlplane/node", "controlplane/vm"),
	"controlplane/invite":             service("controlplane/audit", "controlplane/clusterkey"),
	"controlplane/member":             service("controlplane/consensus", "controlplane/mvcc", "controlplane/clusterkey", "controlplane/peer", "shared/mtls"),
	"controlplane/kv":                 service("controlplane/consensus", "controlplane/mvcc", "controlplane/member", "controlplane/kv/…"),
	"controlplane/kv/users":           {"controlplane/mvcc"},
	"controlplane/kv/snapfile":        {},
	"controlplane/kv/etcdrpc":         {"controlplane/kv", "controlplane/mvcc", "controlplane/kv/users", "controlplane/kv/snapfile", "controlplane/auth", "controlplane/loopback", "controlplane/rpc", "controlplane/member", "shared/…"},
	"controlplane/kv/lessor":          {},
	"controlplane/kv/wire":            {"controlplane/mvcc"},
	"controlplane/kv/watch":           {"controlplane/kv/wire", "controlplane/mvcc"},
	"controlplane/backup":             {"controlplane/clusterkey", "controlplane/consensus", "controlplane/mvcc", "controlplane/store", "shared/…"},
	"controlplane":                    {"controlplane/…", "shared/…"},
	"controlplane/sim":                {"controlplane/…", "shared/…", "protos/…"},
	"controlplane/sim/steps":          {"controlplane/…", "shared/…"},
	"controlplane/sim/live":           {"controlplane/…", "shared/…", "protos/…"},

	"controlplane/credit/ledger":            {"shared/cloud", "shared/fault", "shared/mutant"},
	"controlplane/credit/ledger/ledgertest": {"controlplane/credit/ledger", "shared/cloud", "shared/fault"},

	"nodeagent/qmp":       {},
	"nodeagent/facts":     {"nodeagent/qmp"},
	"nodeagent/cgroup":    {},
	"nodeagent/console":   {},
	"nodeagent/disk":      {"shared/qcow2"},
	"nodeagent/qemu":      {"nodeagent/qmp", "nodeagent/cgroup", "nodeagent/console", "shared/qcow2"},
	"nodeagent/reconcile": {"shared/…", "protos/agent/v1"},
	"nodeagent/machine":   {"nodeagent/…", "protos/…", "shared/…"},
	"nodeagent/uplink":    {"protos/…", "shared/…"},
	"nodeagent/metrics":   {"nodeagent/…", "shared/…"},
	"nodeagent":           {"nodeagent/…", "shared/…", "protos/…"},

	"cli":                 {"cli/…", "protos/…", "shared/…", "controlplane/kv/snapfile"},
	"images/guest":        {},
	"images/guest/guestd": {"images/guest"},
	"e2e/lab":             {"protos/…", "controlplane/clusterkey", "nodeagent/cgroup"},
	"e2e/history":         {"controlplane/credit/ledger", "controlplane/credit/ledger/ledgertest", "shared/cloud"},
	"e2e/bench":           {"e2e/…", "nodeagent/uplink", "images/guest", "protos/…", "shared/…"},
	"e2e/bench/figure":    {},
	"e2e/bench/libvirt":   {},
	"e2e/bench/openloop":  {},
	"e2e/kvbench/load":    {"e2e/…"},
	"e2e/kvbench/subject": {"e2e/…", "controlplane/clusterkey"},
	"e2e/usage":           {"e2e/bench/figure"},
	"e2e/kvbench/verdict": {"e2e/…"},
	"e2e/kvbench":         {"e2e/…", "protos/…", "shared/…"},
	"e2e/up":              {"e2e/lab", "protos/…"},
	"e2e": {"e2e/…", "protos/…", "images/guest", "shared/…", "controlplane/clusterkey",
		"controlplane/rpc/rpctest", "controlplane/mvcc", "controlplane/store", "controlplane/identity/keyring"}, // to look for secrets in what a member has written

	"e2e/creditbench":          {"e2e/…"},
	"e2e/creditbench/books":    {},
	"e2e/creditbench/members":  {"e2e/…", "protos/…"},
	"e2e/creditbench/postgres": {"e2e/…"},
}

// service is what every service may import, and more.
func service(more ...string) []string {
	return append([]string{
		"controlplane/store", "controlplane/rest", "controlplane/rpc", "controlplane/auth", "controlplane/lead", "shared/…", "protos/…",
	}, more...)
}

func TestArrows(t *testing.T) {
	walk(t, func(pkg string, p *build.Package) {
		if strings.HasPrefix(pkg, "protos/") {
			return
		}
		allowed, listed := arrows[pkg]
		if !listed && strings.HasPrefix(pkg, "cli/") {
			allowed, listed = arrows["cli"], true
		}
		require.True(t, listed, "%s is not in the table of arrows", pkg)
		for _, path := range p.Imports {
			if imported, ours := strings.CutPrefix(path, module); ours {
				if !slices.ContainsFunc(allowed, func(a string) bool { return covers(a, imported) }) {
					t.Errorf("%s may not import %s", pkg, imported)
				}
			}
			if path == "os/exec" {
				require.False(t, strings.HasPrefix(pkg, "controlplane"), "%s runs programs: the control plane must not", pkg)
			}
		}
	})
}

func covers(allowed, imported string) bool {
	if below, ok := strings.CutSuffix(allowed, "/…"); ok {
		return imported == below || strings.HasPrefix(imported, below+"/")
	}
	return allowed == imported
}

// The services' edges speak to the service, never to its records.
func TestEdgesDoNotTouchRecords(t *testing.T) {
	edges := []string{"rest.go", "rpc.go"}
	walk(t, func(pkg string, p *build.Package) {
		if !strings.HasPrefix(pkg, "controlplane/") {
			return
		}
		for _, file := range p.GoFiles {
			if !slices.Contains(edges, file) {
				continue
			}
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			require.NoError(t, err)
			require.False(t, strings.Contains(string(text), `"`+module+`controlplane/store"`), "%s/%s imports the store", pkg, file)
		}
	})
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	walk(t, func(pkg string, p *build.Package) {
		if strings.HasPrefix(pkg, "protos/") {
			return
		}
		require.NotEmpty(t, p.Doc, "%s has no package comment", pkg)
	})
}

func TestNoDrawers(t *testing.T) {
	drawers := []string{"util", "utils", "common", "types", "models", "pkg", "cmd", "helpers"}
	walk(t, func(pkg string, _ *build.Package) {
		for _, part := range strings.Split(pkg, "/") {
			require.NotContains(t, drawers, part, pkg)
		}
	})
}

// walk visits every package of the module.
func walk(t *testing.T, visit func(pkg string, p *build.Package)) {
	t.Helper()
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	require.NoError(t, filepath.WalkDir(root, func(dir string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if name := d.Name(); dir != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin") {
			return filepath.SkipDir
		}
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil && dir != root {
			return filepath.SkipDir // a module of its own
		}
		p, err := build.ImportDir(dir, build.ImportComment)
		if err != nil || len(p.GoFiles) == 0 {
			return nil // no Go here, or tests only
		}
		pkg, err := filepath.Rel(root, dir)
		require.NoError(t, err)
		visit(filepath.ToSlash(pkg), p)
		return nil
	}))
}
