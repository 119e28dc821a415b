package robustness

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"

	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"

	"github.com/trivet-cloud/trivet/controlplane/kv/compat/export"
)

// Server is a kind of server with etcd's API that a Round can test.
type Server interface {
	// prepare writes the files that must be in dir before the first member starts.
	prepare(dir string) error
	// command returns the command line of the member with the given ID. The parameter first contains the IDs of the
	// initial members. If joins is true, the member was added to the cluster later.
	command(dir string, id int, first []int, joins bool) []string
	endpoint(id int) string
	// token returns the administrator's token, or "" if the server needs none. It must be called after prepare.
	token(dir string) (string, error)
	// peer returns the peer URL that is used to add the member with the given ID to the cluster.
	peer(id int) string
	// persisted reads the committed requests from the directories of members 1, 2 and so on. These members must have
	// stopped.
	persisted(log *zap.Logger, dirs []string) ([]model.EtcdRequest, error)
}

// Etcd runs etcd; Binary is the path of its program.
type Etcd struct{ Binary string }

func (Etcd) prepare(string) error         { return nil }
func (Etcd) token(string) (string, error) { return "", nil }
func (Etcd) endpoint(id int) string       { return "http://" + address(id) + ":2379" }
func (Etcd) peer(id int) string           { return "http://" + address(id) + ":2380" }

func (e Etcd) command(dir string, id int, first []int, joins bool) []string {
	state := "new"
	if joins {
		state, first = "existing", append(append([]int(nil), first...), id)
	}
	var cluster []string
	for _, m := range first {
		cluster = append(cluster, fmt.Sprintf("m%d=%s", m, e.peer(m)))
	}
	return []string{
		e.Binary, "--name", fmt.Sprintf("m%d", id), "--data-dir", filepath.Join(dir, "data"),
		"--listen-client-urls", e.endpoint(id), "--advertise-client-urls", e.endpoint(id),
		"--listen-peer-urls", e.peer(id), "--initial-advertise-peer-urls", e.peer(id),
		"--initial-cluster", strings.Join(cluster, ","), "--initial-cluster-state", state,
		"--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "warn", "--max-learners", "2",
	}
}

func (Etcd) persisted(log *zap.Logger, dirs []string) ([]model.EtcdRequest, error) {
	var data []string
	for _, dir := range dirs {
		data = append(data, filepath.Join(dir, "data"))
	}
	return report.PersistedRequests(log, data)
}

// Trivet runs Trivet's control plane. Binary is the path of its program. Mutant is optional: it is the name of a rule
// that the program then breaks on purpose. The program must have been built with the tag mutant.
type Trivet struct{ Binary, Mutant string }

// keyName and configName are the names of the files that all members share.
const (
	keyName    = "cluster.key"
	configName = "config.yaml"
)

func (s Trivet) prepare(dir string) error {
	check := 2 * time.Second
	if s.Mutant != "" {
		check = 0 // the check would find the members of some mutants corrupt before a client could observe anything
	}
	secret := make([]byte, 32)
	rand.Read(secret)
	if err := os.WriteFile(filepath.Join(dir, keyName), []byte(base64.StdEncoding.EncodeToString(secret)+"\n"), 0o600); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, configName), fmt.Appendf(nil, "tick: 50ms\ninsecure_plaintext: true\nkv: {open: true, corrupt_check: %s}\n", check), 0o600)
}

func (s Trivet) token(dir string) (string, error) {
	out, err := exec.Command(s.Binary, "admin-token", "--cluster-key", filepath.Join(dir, keyName), "--ttl", "24h").Output()
	if err != nil {
		return "", fmt.Errorf("make an administrator's token: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

func (Trivet) endpoint(id int) string { return "http://" + address(id) + ":50051" }
func (Trivet) peer(id int) string     { return "http://" + address(id) + ":2380" }

func (s Trivet) command(dir string, id int, first []int, joins bool) []string {
	shared := filepath.Dir(dir)
	argv := []string{
		s.Binary, "--config", filepath.Join(shared, configName), "--listen", address(id),
		"--data-dir", filepath.Join(dir, "data"), "--cluster-key", filepath.Join(shared, keyName),
	}
	if s.Mutant != "" {
		argv = append([]string{"/usr/bin/env", "TRIVET_MUTANT=" + s.Mutant}, argv...)
	}
	var cluster, hosts []string
	for _, m := range first {
		cluster = append(cluster, fmt.Sprintf("%d=%s", m, address(m)))
		hosts = append(hosts, address(m))
	}
	if joins {
		return append(argv, "--join", strings.Join(hosts, ","))
	}
	return append(argv, "--node-id", fmt.Sprint(id), "--cluster", strings.Join(cluster, ","))
}

func (Trivet) persisted(_ *zap.Logger, dirs []string) ([]model.EtcdRequest, error) {
	var members []export.Member
	for i, dir := range dirs {
		members = append(members, export.Member{ID: uint64(i + 1), DataDir: filepath.Join(dir, "data")})
	}
	return export.Requests(members)
}
