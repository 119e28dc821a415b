package nettest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// Namespaces makes network namespaces for one test. Their names begin with Prefix, which no other test has. All
// namespaces with the prefix are removed at the end of the test, also those that the tested code has made.
type Namespaces struct {
	testing.TB
	Prefix string
}

var made atomic.Int32

// NewNamespaces returns a Namespaces without any. short begins the prefix; it may have a few characters, because names
// of devices also begin with the prefix. The test fails without root.
func NewNamespaces(t testing.TB, short string) *Namespaces {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test makes network namespaces and needs root")
	}
	n := &Namespaces{t, fmt.Sprintf("%s%d-%d-", short, os.Getpid(), made.Add(1))}
	t.Cleanup(n.remove)
	return n
}

// Path returns the path of the namespace with a name without the prefix.
func (n *Namespaces) Path(name string) string { return filepath.Join(nsthread.Dir, n.Prefix+name) }

// Add makes a namespace and sets its loopback device up. It runs no program, because some tests run in the VM of
// images/guest, which has no iproute2.
func (n *Namespaces) Add(name string) {
	n.Helper()
	_, err := nsthread.Create(n.Prefix + name)
	require.NoError(n, err)
	require.NoError(n, n.In(name, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	}))
}

func (n *Namespaces) remove() {
	paths, _ := filepath.Glob(n.Path("*")) // the only error is one of the pattern
	for _, path := range paths {
		if err := netns.DeleteNamed(filepath.Base(path)); err != nil {
			n.Errorf("remove %s: %v", path, err)
		}
	}
}

// Run runs a program and returns its output. The test fails if the program fails.
func (n *Namespaces) Run(name string, args ...string) string {
	n.Helper()
	out, err := exec.CommandContext(n.Context(), name, args...).CombinedOutput()
	require.NoError(n, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}

// IP runs ip(8) in a namespace and returns its output. The arguments are separated by spaces in the format.
func (n *Namespaces) IP(name, format string, args ...any) string {
	n.Helper()
	return n.Run("ip", append([]string{"-n", n.Prefix + name}, strings.Fields(fmt.Sprintf(format, args...))...)...)
}

// Exec runs a program in a namespace and returns its output.
func (n *Namespaces) Exec(name string, command ...string) string {
	n.Helper()
	return n.Run("ip", append([]string{"netns", "exec", n.Prefix + name}, command...)...)
}

// In calls f in a namespace.
func (n *Namespaces) In(name string, f func() error) error { return nsthread.InNamed(n.Prefix+name, f) }
