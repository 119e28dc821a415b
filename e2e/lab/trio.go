package lab

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
)

// Binaries holds the paths of Trivet's three programs.
type Binaries struct{ ControlPlane, NodeAgent, CLI string }

// In returns the paths of Trivet's programs under their usual names in a directory.
func In(dir string) Binaries {
	return Binaries{filepath.Join(dir, "trivet-controlplane"), filepath.Join(dir, "trivet-nodeagent"), filepath.Join(dir, "trivet")}
}

// Trio is a control plane of three members. By default, members 1 to 3 have the addresses 127.0.0.1 to 127.0.0.3 and
// run in the network namespace of the process that starts them.
type Trio struct {
	Dir Dir
	Bin Binaries
	// Members maps each member's id to its IP address.
	Members map[int]string
	// Extra holds command-line flags that Start appends to the flags of every member.
	Extra []string
	// TLS is the TLS configuration for clients of the members; nil if the members serve plaintext.
	TLS *tls.Config
	// Net, if not nil, returns the path of the network namespace in which a member runs, as Hosts.Net does. Otherwise
	// members run in the network namespace of the process that starts them.
	Net func(id int) string
	// Env, if not nil, returns the environment variables that a member gets besides PATH and GOTRACEBACK.
	Env func(id int) []string
	// Ended, if not nil, is called with a member's exit code when its process has ended, like Program.Ended.
	Ended func(id, code int)
}

// Unlimited holds the member flags that turn off the rate limits on tenants' calls and bytes, for measurements and for
// end-to-end tests that make thousands of changes in one project.
var Unlimited = []string{"--limits-calls-per-second=0", "--limits-bytes-per-second=0"}

// NewTrio returns a Trio of three members whose files are beneath dir. It creates no file and starts no process.
func NewTrio(dir Dir, bin Binaries) *Trio {
	return &Trio{Dir: dir, Bin: bin, Members: map[int]string{1: "127.0.0.1", 2: "127.0.0.2", 3: "127.0.0.3"}}
}

// Name returns the name of a member's process, which is also the name of its data directory beneath t.Dir.
func (t *Trio) Name(id int) string { return fmt.Sprintf("controlplane-%d", id) }

// KeyFile returns the path of the cluster key, which all members share.
func (t *Trio) KeyFile() string { return t.Dir.Path("cluster.key") }

// ImportDir returns the directory from which every member may import image files.
func (t *Trio) ImportDir() string { return t.Dir.Path("import") }

// Prepare creates what must exist before a member starts: the cluster key, the import directory and the members' data
// directories.
func (t *Trio) Prepare() error {
	if err := os.MkdirAll(string(t.Dir), 0o755); err != nil {
		return err
	}
	if _, err := clusterkey.LoadOrMake(t.KeyFile()); err != nil {
		return err
	}
	if err := own(t.KeyFile()); err != nil {
		return err
	}
	if err := os.MkdirAll(t.ImportDir(), 0o755); err != nil {
		return err
	}
	for id := range t.Members {
		if err := os.MkdirAll(t.data(id), 0o700); err != nil {
			return err
		}
		if err := own(t.data(id)); err != nil {
			return err
		}
	}
	return nil
}

// memberUID returns the uid of members: UID, or 0, the caller's own, if the caller is not root.
func memberUID() int {
	if os.Geteuid() != 0 {
		return 0
	}
	return UID
}

// own makes the uid of members the owner of a file.
func own(path string) error {
	if uid := memberUID(); uid != 0 {
		return os.Chown(path, uid, uid)
	}
	return nil
}

func (t *Trio) data(id int) string { return t.Dir.Path(t.Name(id)) }

// DataDir returns the data directory of a member.
func (t *Trio) DataDir(id int) string { return t.data(id) }

// Start starts a member's process and returns without waiting until the member serves.
func (t *Trio) Start(id int) error {
	var cluster []string
	for _, member := range slices.Sorted(maps.Keys(t.Members)) {
		cluster = append(cluster, fmt.Sprintf("%d=%s", member, t.Members[member]))
	}
	binary, err := filepath.Abs(t.Bin.ControlPlane)
	if err != nil {
		return err
	}
	// The member's unprivileged uid may not be able to reach the binary by its path. Run a copy beneath the working
	// directory.
	local := t.Dir.Path("bin", filepath.Base(binary))
	if err := place(binary, local); err != nil {
		return err
	}
	args := []string{
		"--node-id", fmt.Sprint(id), "--listen", t.Members[id], "--data-dir", t.Name(id), "--cluster-key", "cluster.key",
		"--cluster", strings.Join(cluster, ","), "--import-dir", "import",
	}
	p := Program{Name: t.Name(id), Binary: "./bin/" + filepath.Base(binary), Args: append(args, t.Extra...), Work: string(t.Dir), UID: memberUID()}
	if t.Net != nil {
		p.Net = t.Net(id)
	}
	if t.Env != nil {
		p.Env = t.Env(id)
	}
	if t.Ended != nil {
		p.Ended = func(code int) { t.Ended(id, code) }
	}
	return t.Dir.Start(p)
}

// place copies a file to the path to, if the file there does not have the same content. It replaces that file by a
// rename, so a process that runs the old copy is not affected.
func place(from, to string) error {
	a, err := sum(from)
	if err != nil {
		return err
	}
	if b, err := sum(to); err == nil && a == b {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.WriteFile(to+".new", text, 0o755); err != nil {
		return err
	}
	return os.Rename(to+".new", to)
}

// StartAll starts every member that does not run, and returns without waiting until they serve; see Ready.
func (t *Trio) StartAll() error {
	for id := range t.Members {
		if t.Dir.Running(t.Name(id)) == 0 {
			if err := t.Start(id); err != nil {
				return err
			}
		}
	}
	return nil
}

// Ready waits until /ready of every running member returns 200, which means that the cluster has a leader. It returns
// an error if ctx ends first.
func (t *Trio) Ready(ctx context.Context) error {
	for id, host := range t.Members {
		if t.Dir.Running(t.Name(id)) == 0 {
			continue
		}
		err := Until(ctx, "member "+fmt.Sprint(id)+" is ready", func(ctx context.Context) error {
			if t.Dir.Running(t.Name(id)) == 0 {
				return &stopped{tail(t.Dir.LogFile(t.Name(id)))}
			}
			return t.ask(ctx, host+":8084/ready")
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// ask sends a GET request over HTTPS if t.TLS is set, or else over HTTP; url has no scheme. It returns an error unless
// the status is 200.
func (t *Trio) ask(ctx context.Context, url string) error {
	if t.TLS == nil {
		return get(ctx, http.DefaultClient, "http://"+url)
	}
	client := HTTPS(t.TLS)
	defer client.CloseIdleConnections()
	return get(ctx, client, "https://"+url)
}

// tail returns the last five lines of a file, or the text of the error if the file cannot be read.
func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}

// StopAll stops every running member with SIGTERM. A member that still runs after 12 seconds is killed, which is an
// error.
func (t *Trio) StopAll() error {
	var errs []error
	for id := range t.Members {
		if t.Dir.Running(t.Name(id)) != 0 {
			errs = append(errs, t.Dir.Stop(t.Name(id), 12*time.Second))
		}
	}
	return errors.Join(errs...)
}

// AdminToken returns the administrator's token, which one of the members writes to its data directory when a new
// cluster starts. It returns an error if no member has written it yet.
func (t *Trio) AdminToken() (string, error) {
	for id := range t.Members {
		if text, err := os.ReadFile(filepath.Join(t.data(id), "admin.token")); err == nil {
			return strings.TrimSpace(string(text)), nil
		}
	}
	return "", errors.New("no member has written its admin.token")
}
