package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// TestUnderlayWatch changes the addresses of a host, which is a network namespace with the bridge under0. The watch
// must end the agent when the underlay appears and when its address or MTU changes. The watch must not end the agent
// while the address is missing, or because of a further address.
func TestUnderlayWatch(t *testing.T) {
	testenv.NeedRoot(t)
	name := fmt.Sprintf("una%d", os.Getpid())
	_, err := nsthread.Create(name)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, netns.DeleteNamed(name)) })
	ns, err := netns.GetFromPath(filepath.Join("/run/netns", name))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ns.Close()) })
	ip := func(args string) {
		t.Helper()
		out, err := exec.Command("ip", append([]string{"-n", name}, strings.Fields(args)...)...).CombinedOutput()
		require.NoError(t, err, "ip %s: %s", args, out)
	}
	var log bytes.Buffer
	w := &underlayWatch{config: &Config{Underlay: "under0"}, log: slog.New(slog.NewTextHandler(&log, nil))}
	check := func() error { return nsthread.In(ns, func() error { return w.check(t.Context()) }) }
	// restart takes the present underlay as the used one, as an agent that starts does.
	restart := func() {
		require.NoError(t, nsthread.In(ns, func() error {
			u, err := findUnderlay(t.Context(), w.config)
			w.used, w.found = u, underlay{}
			return err
		}))
		require.NoError(t, check())
		require.NoError(t, check())
	}

	require.NoError(t, check())
	require.NoError(t, check())
	w.config.Underlay = "under1" // another text of the error
	require.NoError(t, check())
	w.config.Underlay = "under0"
	require.Equal(t, 1, strings.Count(log.String(), "cannot find the underlay"), "logged once: %s", &log)
	ip("link add under0 type bridge")
	ip("address add 192.0.2.1/24 dev under0")
	ip("link set under0 up")
	require.NoError(t, check(), "the first check that finds it")
	err = check()
	require.ErrorIs(t, err, errUnderlayChanged)
	require.ErrorContains(t, err, "192.0.2.1 with an MTU of 1500 on under0")

	restart()
	ip("address add 198.51.100.1/24 dev under0")
	require.NoError(t, check())
	require.NoError(t, check(), "a further address changes nothing")
	ip("link set under0 mtu 9000")
	require.NoError(t, check())
	require.ErrorContains(t, check(), "192.0.2.1 with an MTU of 9000")

	restart()
	ip("address flush dev under0")
	for range 3 {
		require.NoError(t, check(), "without an address the VPCs keep the one that they have")
	}
	ip("address add 192.0.2.1/24 dev under0")
	require.NoError(t, check())
	require.NoError(t, check(), "the same address again")
	ip("address flush dev under0")
	ip("address add 192.0.2.7/24 dev under0")
	require.NoError(t, check())
	require.ErrorContains(t, check(), "is 192.0.2.7 with an MTU of 9000")
}
