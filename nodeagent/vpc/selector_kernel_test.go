package vpc

import (
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSelector uses a service IP that has an address of the VPC's service range and selects its backends by a label.
// Clients are on two hosts. During the test, only records of ports change.
func TestSelector(t *testing.T) {
	const api = "10.0.200.7:80"
	l := newLab(t, 2)
	one, two := l.hosts[0], l.hosts[1]
	records := strings.NewReplacer(
		"vpc shop\n", "vpc shop services=10.0.200.0/24\n", "\tport vip vpc=shop subnet=s1 at=10.0.1.50\n", "",
		"at=10.0.1.50", "at=10.0.200.7", "to=one,two,three*2", "selector=app:api",
	).Replace(balanced)
	const portOne = "port one vpc=shop subnet=s1 at=10.0.1.11 node=n1 groups=backend gen=1"
	const portTwo = "port two vpc=shop subnet=s1 at=10.0.1.12 node=n2 groups=backend gen=1"
	records = strings.Replace(records, portOne, portOne+" labels=app:api", 1)
	revision := int64(1)
	for _, h := range l.hosts {
		h.snapshot(revision, records)
	}
	change := func(record string) {
		revision++
		for _, h := range l.hosts {
			h.change(revision, record)
		}
	}
	clients := []string{one.endpoint("client"), two.endpoint("far")}
	l.greet(one.endpoint("one"), "one", 8080)
	l.greet(two.endpoint("two"), "two", 8080)
	requireBackends := func(want ...string) {
		t.Helper()
		for _, from := range clients {
			require.Equal(t, want, slices.Sorted(maps.Keys(l.askOften(60, from, api))))
		}
	}
	requireBackends("one")
	change(portTwo + " labels=app:api,tier:front")
	requireBackends("one", "two")
	change(portOne + " labels=app:db")
	requireBackends("two")
	change("delete two")
	for _, from := range clients {
		require.ErrorIs(t, l.refused(from, api), syscall.ECONNREFUSED)
	}
}
