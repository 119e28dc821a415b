package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// TestGuestPacketFilter checks that processes with the uids of QEMU can only connect to the ports of Ceph, in a network
// namespace with the packet filter, and that a second call changes nothing.
func TestGuestPacketFilter(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	const first, last = 640_000, 640_099
	name := fmt.Sprintf("trivet-test-rbdhost-%d", os.Getpid())
	for _, args := range [][]string{{"netns", "add", name}, {"-n", name, "link", "set", "lo", "up"}} {
		out, err := exec.Command("ip", args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
		if args[1] == "add" {
			t.Cleanup(func() { require.NoError(t, exec.Command("ip", "netns", "del", name).Run()) })
		}
	}
	ns, err := netns.GetFromName(name)
	require.NoError(t, err)
	defer ns.Close()
	rules := func() string {
		out, err := exec.Command("ip", "netns", "exec", name, "nft", "-a", "list", "ruleset").CombinedOutput()
		require.NoError(t, err, "%s", out)
		return string(out)
	}
	require.NoError(t, nsthread.In(ns, func() error { return limitGuests(t.Context(), "trivet-", first, last) }))
	before := rules()
	require.Contains(t, before, "table inet trivet-qemu")
	require.NoError(t, nsthread.In(ns, func() error { return limitGuests(t.Context(), "trivet-", first, last) }))
	require.Equal(t, before, rules(), "a second call writes nothing")

	connects := func(uid uint32, port int) bool {
		require.NoError(t, nsthread.In(ns, func() error {
			l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
			if err == nil {
				t.Cleanup(func() { _ = l.Close() })
			}
			return err
		}))
		cmd := exec.Command("ip", "netns", "exec", name, "setpriv", "--reuid", fmt.Sprint(uid), "--clear-groups", "timeout", "2",
			"bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/127.0.0.1/%d", port))
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		return cmd.Run() == nil
	}
	require.True(t, connects(first, 3300), "a monitor")
	require.True(t, connects(last, 6801), "an OSD")
	require.False(t, connects(first, 8080), "a service of the host")
	require.False(t, connects(last, 7443), "a member")
	require.True(t, connects(last+1, 8081), "another user")
}

// TestRBDProblem checks the reasons why a host does not serve RBD, and the validation of the setting rbd_helper.
func TestRBDProblem(t *testing.T) {
	a := &agent{config: Default()}
	require.ErrorContains(t, a.checkRBD(t.Context(), &facts.Host{}), "rbd_helper is empty")
	a.config.RBDHelper = "/nowhere/trivet-rbd"
	require.ErrorContains(t, a.checkRBD(t.Context(), &facts.Host{}), "qemu-block-extra")
	err := a.checkRBD(t.Context(), &facts.Host{QEMU: facts.QEMU{RBD: true}})
	require.ErrorContains(t, err, "trivet-rbd does not start")
	require.Equal(t, err.Error(), rbdProblem(err))
	require.Empty(t, rbdProblem(nil))
	require.Len(t, rbdProblem(fmt.Errorf("%s", strings.Repeat("long\n", 100))), maxRBDProblem)
	a.config.RBDHelper = "trivet-rbd"
	require.ErrorContains(t, a.config.validateRBD(), "absolute")
}
