// Package shared checks, in this file, the imports of all packages of the module. An import that its tables do not list
// is an error. The folders below it contain the packages that both programs use.
package shared

import (
	"errors"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/trivet-cloud/trivet/"

// layers are the folders of controlplane, from the bottom up. A package may import packages of lower layers without an
// entry in inside. Folders in one row must not import each other.
//
// For example, controlplane/compute/vm may import everything in engine, edge, records and accounts (lower layers), of
// its own layer compute/image, compute/node and compute/schedule (inside), and shared/… and protos/… (outside). It may
// not import money or kv. Its files rpc*.go and rest*.go may not import records/store.
var layers = [][]string{
	{"engine", "edge"},
	{"records"},
	{"accounts"},
	{"network"},
	{"compute"},
	{"money"},
	{"cluster"},
	{"kv"},
}

// outside lists, for each layer of controlplane, the packages outside of controlplane that its packages may import.
var outside = map[string][]string{
	"engine":   {"shared/mutant", "shared/mtls", "shared/atomicfile", "shared/filelock"}, // and no package of Trivet's domain
	"edge":     {"shared/…"},
	"records":  {"shared/…", "protos/peer/v1"},
	"accounts": {"shared/…", "protos/…"},
	"network":  {"shared/…", "protos/…"},
	"compute":  {"shared/…", "protos/…"},
	"money":    {"shared/…", "protos/…"},
	"cluster":  {"shared/…", "protos/…"},
	"kv":       {"shared/…", "protos/…"},
}

// inside lists, for each package of controlplane, the packages of its own layer that it may import. A package without
// an entry may import none.
var inside = map[string][]string{
	"engine/consensus":          {"engine/consensus/…"},
	"engine/consensus/raftlog":  {"engine/consensus/raftconf", "engine/consensus/internal/codec"},
	"engine/consensus/message":  {"engine/consensus/raftconf", "engine/consensus/internal/codec"},
	"engine/consensus/raftconf": {"engine/consensus/internal/codec"},
	"engine/mvcc":               {"engine/mvcc/…"},
	"engine/mvcc/keyindex":      {"engine/mvcc/command"},
	"engine/mvcc/watch":         {"engine/mvcc/command"},
	"engine/datadir":            {"engine/clusterkey", "engine/layout"},

	"edge/rest":                {"edge/auth", "edge/loopback"},
	"edge/rest/resttest":       {"edge/rest"},
	"edge/protorest":           {"edge/auth", "edge/rest"},
	"edge/openapi":             {"edge/auth", "edge/rest", "edge/protorest"},
	"edge/openapi/openapitest": {"edge/openapi", "edge/rest"},
	"edge/rpc":                 {"edge/auth", "edge/delay"},

	"records/leader/leadertest": {"records/leader"},
	"records/store":             {"records/leader"},
	"records/store/storetest":   {"records/store"},
	"records/transport":         {"records/leader"},

	"accounts/identity":           {"accounts/audit", "accounts/tenant", "accounts/identity/…"},
	"accounts/identity/principal": {"accounts/identity/password", "accounts/tenant"},

	"compute/console":               {"compute/node"},
	"compute/image":                 {"compute/image/websource"},
	"compute/node":                  {"compute/schedule"},
	"compute/node/nodetest":         {"compute/node"},
	"compute/schedule/bench":        {"compute/schedule", "compute/schedule/scheduletest"},
	"compute/schedule/scheduletest": {"compute/schedule"},
	"compute/snapshot":              {"compute/volume"},
	"compute/volume":                {"compute/image", "compute/node", "compute/storageclass"},
	"compute/vm":                    {"compute/drain", "compute/image", "compute/node", "compute/schedule", "compute/volume"},

	"money/credit":                   {"money/credit/ledger"},
	"money/credit/ledger/ledgertest": {"money/credit/ledger"},
	"money/billing":                  {"money/credit", "money/credit/ledger"},

	"network": {"network/ipam"},

	"cluster/operator": {"cluster/jointoken", "cluster/membership"},

	"kv":         {"kv/lessor", "kv/snapfile", "kv/translate", "kv/users", "kv/watch"},
	"kv/etcdrpc": {"kv", "kv/snapfile", "kv/users"},
	"kv/restapi": {"kv"},
	"kv/watch":   {"kv/translate"},
}

// pure lists packages that may import only the given packages of lower layers, which for most is none.
var pure = map[string][]string{
	"network/ipam":                   {},
	"compute/drain":                  {},
	"compute/schedule":               {},
	"compute/schedule/scheduletest":  {},
	"money/credit/ledger":            {},
	"money/credit/ledger/ledgertest": {},
	"accounts/identity/password":     {},
	"accounts/identity/token":        {},
	"accounts/identity/oidc":         {},
	"kv/lessor":                      {},
	"kv/snapfile":                    {},
	"kv/translate":                   {"engine/mvcc/command"},
	"kv/users":                       {"engine/mvcc/command"},
	"kv/watch":                       {"engine/mvcc", "engine/mvcc/watch"},
}

// others lists, for each package outside of the layers, the packages of the module that it may import. A value that
// ends in /… includes all packages below it.
var others = map[string][]string{
	"shared/atomicfile":        {},
	"shared/filelock":          {},
	"shared/fault":             {},
	"shared/filter":            {"shared/fault"},
	"shared/mutant":            {},
	"shared/mutant/mutanttest": {},
	"shared/mtls":              {"shared/atomicfile", "shared/mutant"},
	"shared/rbddiff":           {},
	"shared/qcow2":             {"shared/mutant"},
	"shared/vdisk":             {"shared/qcow2"},
	"shared/retry":             {},
	"shared/cloudinit":         {},
	"shared/cloud":             {"shared/fault", "shared/mutant"},
	"shared/settings":          {},
	"shared/version":           {},
	"shared/scrape":            {"shared/mutant"},
	"shared/testenv":           {},
	"shared/metricstest":       {},
	"shared/protodoc":          {},
	"shared/convert":           {"shared/cloud", "shared/fault", "protos/…"},

	"controlplane": {"controlplane/…", "shared/…", "docs/api"},
	"controlplane/config": {"controlplane/accounts/identity/oidc", "controlplane/compute/image", "controlplane/kv", "controlplane/kv/users",
		"controlplane/money/billing", "controlplane/records/budget", "shared/cloud", "shared/settings", "shared/scrape"}, // for the types and defaults of these packages' settings
	"controlplane/offline": {"controlplane/config", "controlplane/engine/…", "controlplane/records/store", "controlplane/accounts/identity",
		"controlplane/accounts/identity/token", "shared/cloud", "shared/atomicfile"},
	"controlplane/sim":       {"controlplane/…", "shared/…", "protos/…"},
	"controlplane/sim/steps": {"controlplane/…", "shared/…"},
	"controlplane/sim/live":  {"controlplane/…", "shared/…", "protos/…"},

	"nodeagent/qmp":       {"shared/retry"},
	"nodeagent/facts":     {"nodeagent/pinning", "nodeagent/qmp"},
	"nodeagent/cgroup":    {"shared/retry"},
	"nodeagent/console":   {},
	"nodeagent/disk":      {"shared/qcow2", "shared/mutant", "shared/atomicfile"},
	"nodeagent/volume":    {"nodeagent/disk", "nodeagent/rbd", "protos/rbd/v1", "shared/qcow2", "shared/rbddiff", "shared/mutant", "shared/atomicfile"},
	"nodeagent/qemu":      {"nodeagent/qmp", "nodeagent/cgroup", "nodeagent/console", "shared/qcow2", "shared/mutant", "shared/atomicfile"},
	"nodeagent/nsthread":  {"shared/mutant"},
	"nodeagent/netspace":  {"nodeagent/nsthread"},
	"nodeagent/nettest":   {"nodeagent/nsthread"},
	"nodeagent/netdev":    {"nodeagent/netspace", "nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/ipsec":     {"nodeagent/netspace", "nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/firewall":  {"nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/netfilter": {"nodeagent/nsthread"},
	"nodeagent/edge":      {"nodeagent/netspace", "nodeagent/netfilter", "nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/balancer":  {"nodeagent/netspace", "nodeagent/netfilter", "nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/health":    {"nodeagent/nsthread", "shared/cloud"},
	"nodeagent/peering":   {"nodeagent/netspace", "nodeagent/netdev", "nodeagent/netfilter", "nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/dhcp":      {"nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/resolver":  {"nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/metadata":  {"shared/cloudinit", "nodeagent/nsthread", "shared/cloud", "shared/mutant"},
	"nodeagent/rbd":       {"protos/rbd/v1"},
	"nodeagent/storage":   {"nodeagent/volume", "nodeagent/disk", "nodeagent/rbd", "protos/…", "shared/…"},
	"nodeagent/lease":     {},
	"nodeagent/pinning":   {},
	"nodeagent/watchdog":  {},
	"nodeagent/tunnel":    {"shared/mtls", "shared/filelock"},
	"nodeagent/reconcile": {"shared/…", "protos/agent/v1"},
	"nodeagent/machine":   {"nodeagent/…", "protos/…", "shared/…"},
	"nodeagent/uplink":    {"nodeagent/console", "nodeagent/lease", "protos/…", "shared/…"},
	"nodeagent/vpc":       {"nodeagent/…", "shared/…"},
	"nodeagent/metrics":   {"nodeagent/…", "shared/…"},
	"nodeagent":           {"nodeagent/…", "shared/…", "protos/…"},

	"nodeagent/rbd/rbdtest":        {"protos/rbd/v1"},
	"nodeagent/watchdog/probe":     {"nodeagent/watchdog"},
	"nodeagent/cgroup/cgrouptest":  {"nodeagent/cgroup"},
	"nodeagent/firewall/frametest": {"nodeagent/nsthread", "shared/cloud"},

	"cli":                 {"cli/…", "protos/…", "shared/…", "images", "controlplane/kv/snapfile"},
	"docs/docstest":       {},
	"docs/api":            {},
	"packaging":           {},
	"images":              {},
	"images/guest":        {},
	"images/guest/guestd": {"images/guest"},
	"e2e/lab":             {"protos/…", "controlplane/engine/clusterkey", "nodeagent/cgroup", "nodeagent/nsthread"},
	"e2e/history":         {"controlplane/money/credit/ledger", "controlplane/money/credit/ledger/ledgertest", "shared/cloud"},
	"e2e/bench":           {"e2e/…", "nodeagent/uplink", "images/guest", "protos/…", "shared/…"},
	"e2e/migrationbench":  {"e2e/…", "images/guest", "nodeagent/dhcp", "nodeagent/qmp", "protos/…", "shared/cloud"},
	"e2e/bench/figure":    {},
	"e2e/bench/libvirt":   {},
	"e2e/bench/openloop":  {},
	"e2e/bench/program":   {"e2e/lab"},
	"e2e/bench/report":    {"e2e/usage"},
	"e2e/bench/table":     {"e2e/kvbench/verdict"},
	"e2e/bench/onehost":   {"e2e/lab", "protos/…"},
	"e2e/kvbench/load":    {"e2e/…"},
	"e2e/kvbench/subject": {"e2e/…", "controlplane/engine/clusterkey"},
	"e2e/usage":           {"e2e/bench/figure"},
	"e2e/kvbench/verdict": {"e2e/…"},
	"e2e/kvbench":         {"e2e/…", "protos/…", "shared/…"},
	"e2e/demo":            {"e2e/lab", "cli/account", "protos/…"}, // to save logins
	"e2e/dev":             {"e2e/demo", "e2e/lab", "shared/version"},
	"e2e/up":              {"e2e/demo", "e2e/lab", "cli/account", "protos/…"},
	"e2e": {"e2e/…", "protos/…", "images/guest", "shared/…", "controlplane/engine/clusterkey",
		"controlplane/edge/rpc/rpctest", "controlplane/engine/mvcc", "controlplane/records/store", "controlplane/accounts/identity/keyring"}, // to search the files of a member for secrets

	"e2e/networkbench":         {"e2e/…", "nodeagent/…", "images/guest", "protos/…", "shared/…"},
	"e2e/storagebench":         {"e2e/…", "nodeagent/qmp", "nodeagent/rbd/rbdtest", "images/guest", "protos/…"},
	"e2e/creditbench":          {"e2e/…"},
	"e2e/creditbench/books":    {},
	"e2e/creditbench/members":  {"e2e/…", "protos/…"},
	"e2e/creditbench/postgres": {"e2e/…"},
}

// inTests lists, for each package, what its test files may import in addition to what allowedInTests allows all test
// files.
var inTests = map[string][]string{
	"nodeagent/edge":          {"nodeagent/balancer", "nodeagent/firewall", "nodeagent/netdev", "nodeagent/nettest"}, // the rules apply to floating IPs
	"nodeagent/peering":       {"nodeagent/firewall", "nodeagent/nettest"},                                           // the rules apply to packets of peerings
	"nodeagent/firewall":      {"nodeagent/nettest"},
	"nodeagent/netdev":        {"nodeagent/nettest"},
	"nodeagent/ipsec":         {"nodeagent/nettest"},
	"cli":                     {"docs/docstest", "controlplane/money/credit/ledger", "controlplane/money/credit/ledger/ledgertest"},
	"controlplane/config":     {"docs/docstest"},
	"controlplane/compute/vm": {"controlplane/compute/storageclass"},
	"controlplane/network":    {"nodeagent/firewall"}, // which decides about the packets that ExplainPath explains
	"controlplane/kv/restapi": {"controlplane/kv/users"},
	"controlplane/kv/watch":   {"controlplane/engine/mvcc/command"},
	"nodeagent/qemu":          {"nodeagent/cgroup/cgrouptest"},
	"nodeagent/machine":       {"nodeagent/cgroup/cgrouptest", "images/guest"}, // its package computes the data that a guest writes to its volumes
	"controlplane":            {"docs/docstest"},
	"nodeagent":               {"docs/docstest"},
	"nodeagent/metrics":       {"docs/docstest"},
	"e2e":                     {"cli/openid/openidtest", "controlplane/edge/openapi/openapitest", "docs/api", "controlplane/money/credit/ledger", "nodeagent/cgroup", "nodeagent/cgroup/cgrouptest", "nodeagent/firewall/frametest", "nodeagent/ipsec", "nodeagent/qmp", "nodeagent/rbd/rbdtest"},
	"e2e/history":             {"shared/fault"},

	// Packages of tests with hosts.
	"controlplane/compute/snapshot": {"controlplane/compute/node", "controlplane/compute/node/nodetest", "controlplane/compute/storageclass"},
}

// allowed returns the packages of the module that a package may import, and whether the package is in the tables.
func allowed(pkg string) (imports []string, listed bool) {
	in, isControlplane := strings.CutPrefix(pkg, "controlplane/")
	layer, _, _ := strings.Cut(in, "/")
	height := slices.IndexFunc(layers, func(row []string) bool { return slices.Contains(row, layer) })
	if !isControlplane || height < 0 {
		if imports, listed = others[pkg]; !listed && strings.HasPrefix(pkg, "cli/") {
			imports, listed = others["cli"], true
		}
		return imports, listed
	}
	imports = slices.Clone(outside[layer])
	for _, path := range inside[in] {
		imports = append(imports, "controlplane/"+path)
	}
	lower := slices.Concat(layers[:height]...)
	if only, is := pure[in]; is {
		lower = nil
		for _, path := range only {
			imports = append(imports, "controlplane/"+path)
		}
	}
	for _, path := range lower {
		imports = append(imports, "controlplane/"+path+"/…")
	}
	return imports, true
}

// allowedInTests reports whether the test files of pkg may import the package imported: pkg itself, all that pkg may
// import, the fixtures of these, an entry in inTests, the messages (protos), and shared/testenv. A fixture is a package
// with a name that ends in test, in the directory of the package that it is for.
func allowedInTests(pkg string, imports []string, imported string) bool {
	parent, name := path.Split(imported)
	parent = strings.TrimSuffix(parent, "/")
	fixture := strings.HasSuffix(name, "test") && (parent == pkg || coversAny(imports, parent))
	return imported == pkg || fixture || coversAny(imports, imported) || coversAny(inTests[pkg], imported) ||
		covers("protos/…", imported) || imported == "shared/testenv"
}

func TestImports(t *testing.T) {
	checked, checkedInTests := 0, 0
	walk(t, func(pkg string, p *build.Package) {
		if covers("protos/…", pkg) {
			return
		}
		imports, listed := allowed(pkg)
		require.True(t, listed || len(p.GoFiles) == 0, "%s is in no table of this file", pkg)
		for _, path := range p.Imports {
			if imported, ours := strings.CutPrefix(path, module); ours {
				checked++
				if !coversAny(imports, imported) {
					t.Errorf("%s must not import %s", pkg, imported)
				}
			}
			if path == "os/exec" {
				require.False(t, strings.HasPrefix(pkg, "controlplane"), "%s runs programs, which the control plane must not", pkg)
			}
		}
		for _, path := range slices.Concat(p.TestImports, p.XTestImports) {
			if imported, ours := strings.CutPrefix(path, module); ours {
				checkedInTests++
				if !allowedInTests(pkg, imports, imported) {
					t.Errorf("the tests of %s must not import %s", pkg, imported)
				}
			}
		}
	})
	require.Greater(t, checked, 300, "imports were not found")
	require.Greater(t, checkedInTests, 300, "imports of tests were not found")
}

func coversAny(allowed []string, imported string) bool {
	return slices.ContainsFunc(allowed, func(a string) bool { return covers(a, imported) })
}

func covers(allowed, imported string) bool {
	if below, ok := strings.CutSuffix(allowed, "/…"); ok {
		return imported == below || strings.HasPrefix(imported, below+"/")
	}
	return allowed == imported
}

// TestHandlersDoNotUseTheStore checks that files that translate messages (rest*.go and rpc*.go of controlplane) do not
// import the store, because they must call the service instead.
func TestHandlersDoNotUseTheStore(t *testing.T) {
	handlers := regexp.MustCompile(`^(rest|rpc).*\.go$`)
	packages := []string{"controlplane/kv/etcdrpc", "controlplane/kv/restapi"} // all files of these packages translate messages
	checked := 0
	walk(t, func(pkg string, p *build.Package) {
		if !strings.HasPrefix(pkg, "controlplane/") {
			return
		}
		for _, file := range p.GoFiles {
			if !handlers.MatchString(file) && !slices.Contains(packages, pkg) {
				continue
			}
			checked++
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			require.NoError(t, err)
			require.NotContains(t, string(text), `"`+module+`controlplane/records/store"`, "%s/%s imports the store", pkg, file)
		}
	})
	require.Greater(t, checked, 20, "the files were not found")
}

// TestNoInitFunctions checks that no package has an init function, so that main alone determines what a program does at
// its start.
func TestNoInitFunctions(t *testing.T) {
	walk(t, func(pkg string, p *build.Package) {
		if strings.HasPrefix(pkg, "protos/") {
			return
		}
		for _, file := range slices.Concat(p.GoFiles, p.TestGoFiles, p.XTestGoFiles) {
			parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			for _, d := range parsed.Decls {
				if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
					require.NotEqual(t, "init", f.Name.Name, "%s/%s", pkg, file)
				}
			}
		}
	})
}

func TestEveryPackageHasAComment(t *testing.T) {
	walk(t, func(pkg string, p *build.Package) {
		if strings.HasPrefix(pkg, "protos/") {
			return
		}
		require.True(t, p.Doc != "" || len(p.GoFiles) == 0, "%s has no package comment", pkg)
	})
}

func TestNoUtilityPackages(t *testing.T) {
	names := []string{"util", "utils", "common", "types", "models", "pkg", "cmd", "helpers"}
	walk(t, func(pkg string, _ *build.Package) {
		for _, part := range strings.Split(pkg, "/") {
			require.NotContains(t, names, part, pkg)
		}
	})
}

// walk calls visit for every package of the module, also for those with only test files: once with the files of a
// normal build, and once with those of the build tags mutant and long.
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
			return filepath.SkipDir // a separate module
		}
		pkg, err := filepath.Rel(root, dir)
		require.NoError(t, err)
		for _, tags := range [][]string{nil, {"mutant", "long"}} {
			files := build.Default
			files.BuildTags = tags
			p, err := files.ImportDir(dir, build.ImportComment)
			if noGo := (*build.NoGoError)(nil); errors.As(err, &noGo) {
				continue
			}
			require.NoError(t, err, "read package %s", pkg)
			visit(filepath.ToSlash(pkg), p)
		}
		return nil
	}))
}
