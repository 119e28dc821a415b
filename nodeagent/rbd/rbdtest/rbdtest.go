// Package rbdtest starts real Ceph clusters for tests: one monitor and one OSD whose store is a sparse file, with the
// programs of Debian's packages ceph-mon, ceph-osd and ceph-common. A cluster takes about ten seconds to start. It
// has, unless StartAt gets another one, an address of its own in 127.0.0.0/8, so that several can run at once.
package rbdtest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"text/template"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// Pool is the name of the only pool of each cluster.
const Pool = "rbd"

// User is the name of the Ceph user of hosts. Its permissions are those of Ceph's profile rbd.
const User = "trivet"

// Ceph is a running cluster.
type Ceph struct {
	FSID    string
	Monitor string // in the form of mon_host
	Address string // of the monitor: an IP address and the port of protocol version 2
	Key     string // of User
	// Conf is the path of a ceph.conf for the administrator.
	Conf string

	t        testing.TB
	dir      string
	mon, osd *exec.Cmd
}

// Start starts a cluster, which ends with the test. It skips the test if Ceph is not installed.
func Start(t testing.TB) *Ceph {
	t.Helper()
	pid := os.Getpid()
	return StartAt(t, fmt.Sprintf("127.%d.%d.%d", 200+pid%50, pid/50%250+1, pid/12500%250+1))
}

// StartAt is Start with the IPv4 address of the cluster, which this machine must have.
func StartAt(t testing.TB, ip string) *Ceph {
	t.Helper()
	for _, program := range []string{"ceph-mon", "ceph-osd", "ceph", "rbd", "ceph-authtool", "monmaptool"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("Ceph is not installed: %v", err)
		}
	}
	// Below /tmp, because the paths of Ceph's sockets must be short.
	dir, err := os.MkdirTemp("", "trivet-rbdtest-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	c := &Ceph{
		FSID: uuid.NewString(), Monitor: fmt.Sprintf("[v2:%s:3300,v1:%[1]s:6789]", ip), Address: ip + ":3300", Conf: filepath.Join(dir, "ceph.conf"),
		t: t, dir: dir,
	}
	c.write(ip)
	c.startMonitor(ip)
	c.startOSD()
	c.Run("ceph", "osd", "pool", "create", Pool, "8", "8")
	c.Run("ceph", "osd", "pool", "application", "enable", Pool, "rbd")
	c.Run("rbd", "create", Pool+"/probe", "--size", "1M")
	c.Run("rbd", "rm", Pool+"/probe", "--no-progress")
	return c
}

// Connect returns the arguments of RbdService's Connect for the cluster.
func (c *Ceph) Connect() *rbdv1.ConnectRequest {
	return &rbdv1.ConnectRequest{Fsid: c.FSID, Monitors: []string{c.Monitor}, User: User, Key: c.Key}
}

// Run runs a program of Ceph as the cluster's administrator, and returns its standard output.
func (c *Ceph) Run(program string, args ...string) string {
	c.t.Helper()
	return strings.TrimSpace(string(c.Output(program, args...)))
}

// Output runs a program like Run, and returns its standard output without trimming white space.
func (c *Ceph) Output(program string, args ...string) []byte {
	c.t.Helper()
	cmd := c.Command(program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	require.NoError(c.t, cmd.Run(), "%s %s: %s", program, strings.Join(args, " "), &stderr)
	return stdout.Bytes()
}

// Command returns a command that runs a program as the cluster's administrator.
func (c *Ceph) Command(program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(c.t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "CEPH_CONF="+c.Conf)
	return cmd
}

// Stop ends all daemons of the cluster. Their data stays, and Restart starts them again.
func (c *Ceph) Stop() {
	c.end(c.osd)
	c.end(c.mon)
}

// Restart starts the daemons again after Stop.
func (c *Ceph) Restart() {
	c.mon = c.start("ceph-mon", "-f", "-i", "a")
	c.osd = c.start("ceph-osd", "-f", "-i", "0")
}

// Pause stops the OSD process (SIGSTOP), so that the cluster answers no request for data until Continue is called.
func (c *Ceph) Pause() {
	require.NoError(c.t, c.osd.Process.Signal(syscall.SIGSTOP))
}

// Continue ends Pause.
func (c *Ceph) Continue() {
	require.NoError(c.t, c.osd.Process.Signal(syscall.SIGCONT))
}

// RestartOSD ends the OSD and starts it again.
func (c *Ceph) RestartOSD() {
	c.end(c.osd)
	c.osd = c.start("ceph-osd", "-f", "-i", "0")
}

var conf = template.Must(template.New("ceph.conf").Parse(`[global]
fsid = {{.FSID}}
mon_host = {{.Monitor}}
mon_initial_members = a
public_addr = {{.IP}}
cluster_addr = {{.IP}}
public_network = {{.IP}}/32
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {{.Dir}}/admin.keyring
run_dir = {{.Dir}}
admin_socket = {{.Dir}}/$name.$pid.asok
log_file = {{.Dir}}/$name.log
log_to_stderr = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
# The read lease of a placement group lasts this number times osd_heartbeat_grace (20 s), longer than any Pause.
osd_pool_default_read_lease_ratio = 100
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_data_avail_crit = 1
mon_data_avail_warn = 2
osd_crush_chooseleaf_type = 0
rbd_default_features = 61
[mon.a]
mon_data = {{.Dir}}/mon
keyring = {{.Dir}}/mon.keyring
[osd]
osd_data = {{.Dir}}/osd
keyring = {{.Dir}}/osd/keyring
osd_objectstore = bluestore
bluestore_block_size = 3221225472
bluestore_block_create = true
osd_memory_target = 939524096
bluestore_cache_autotune = false
bluestore_cache_size = 134217728
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
osd_mclock_skip_benchmark = true
osd_fast_shutdown = true
osd_client_watch_timeout = 5
`))

// write writes the configuration and the keys. The monitor knows all keys from its start.
func (c *Ceph) write(ip string) {
	var text bytes.Buffer
	require.NoError(c.t, conf.Execute(&text, struct {
		*Ceph
		Dir, IP string
	}{c, c.dir, ip}))
	require.NoError(c.t, os.WriteFile(c.Conf, text.Bytes(), 0o600))
	for _, name := range []string{"mon", "osd"} {
		require.NoError(c.t, os.Mkdir(filepath.Join(c.dir, name), 0o700))
	}
	admin, mon := filepath.Join(c.dir, "admin.keyring"), filepath.Join(c.dir, "mon.keyring")
	c.Run("ceph-authtool", "--create-keyring", mon, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
	c.Run("ceph-authtool", "--create-keyring", admin, "--gen-key", "-n", "client.admin",
		"--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
	osdKey := c.Run("ceph-authtool", "--gen-print-key")
	c.Key = c.Run("ceph-authtool", "--gen-print-key")
	c.Run("ceph-authtool", "--create-keyring", filepath.Join(c.dir, "osd", "keyring"), "-n", "osd.0", "--add-key", osdKey)
	keys, err := os.ReadFile(admin)
	require.NoError(c.t, err)
	file, err := os.OpenFile(mon, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(c.t, err)
	defer file.Close()
	_, err = fmt.Fprintf(file, "%s[osd.0]\n\tkey = %s\n\tcaps mon = \"allow profile osd\"\n\tcaps osd = \"allow *\"\n"+
		"[client.%s]\n\tkey = %s\n\tcaps mon = \"profile rbd\"\n\tcaps osd = \"profile rbd\"\n", keys, osdKey, User, c.Key)
	require.NoError(c.t, err)
}

func (c *Ceph) startMonitor(ip string) {
	monmap := filepath.Join(c.dir, "monmap")
	c.Run("monmaptool", "--create", "--addv", "a", fmt.Sprintf("[v2:%s:3300,v1:%[1]s:6789]", ip), "--fsid", c.FSID, monmap)
	c.Run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", filepath.Join(c.dir, "mon.keyring"))
	c.mon = c.start("ceph-mon", "-f", "-i", "a")
}

func (c *Ceph) startOSD() {
	id := uuid.NewString()
	require.Equal(c.t, "0", c.Run("ceph", "osd", "new", id))
	c.Run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", id)
	c.osd = c.start("ceph-osd", "-f", "-i", "0")
}

// start starts a daemon and ends it at the end of the test. If the test process is killed, the kernel kills the daemon.
func (c *Ceph) start(program string, args ...string) *exec.Cmd {
	c.t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), "CEPH_CONF="+c.Conf)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, stop, stopped := make(chan error), make(chan struct{}), make(chan struct{})
	go func() {
		runtime.LockOSThread() // Pdeathsig is sent when the thread that started the program ends
		defer close(stopped)
		started <- cmd.Start()
		<-stop
	}()
	err := <-started
	c.t.Cleanup(func() {
		close(stop)
		<-stopped
	})
	require.NoError(c.t, err)
	c.t.Cleanup(func() { c.end(cmd) })
	return cmd
}

// end ends a daemon, with SIGKILL if it takes longer than ten seconds.
func (c *Ceph) end(cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGCONT)
	_ = cmd.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	_ = cmd.Wait()
	if c.t.Failed() {
		c.t.Logf("%s: %s", cmd.Path, cmd.ProcessState)
	}
}
