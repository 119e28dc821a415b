package main

import (
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/apply"
	"github.com/trivet-cloud/trivet/cli/network"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/vm"
	"github.com/trivet-cloud/trivet/cli/volume"
)

// TestApplyComparesAllFlags lists the flags of the create commands, which are the keys of `trivet apply`. A flag that
// apply does not compare would be ignored without an error for an object that exists. So a new flag needs a line here:
// either it is compared, or the cloud does not record it, and docs/cli.md says that it matters only for a new object.
func TestApplyComparesAllFlags(t *testing.T) {
	flags := map[string]struct{ compared, onlyNew string }{
		"vpc":            {"cidr description ipv6 ipv6-cidr mtu service-cidr", "egress external"},
		"subnet":         {"cidr description dns gateway ipv6 ipv6-cidr no-dhcp vpc", ""},
		"security-group": {"description rule", ""},
		"volume":         {"class label metadata size", "image snapshot"},
		"vm": {"cdrom cmdline cores-per-socket cpu-model cpu-policy disk firmware hugepages image initrd kernel label memory " +
			"metadata network os-type rtc secure-boot sockets tpm vcpus volume " +
			"affinity affinity-soft anti-affinity anti-affinity-soft ha ha-priority host restart-policy spread spread-group type", "no-wait ssh-key start user-data wait"},
	}
	s, _ := commands(session.Shell{
		Env: func(string) string { return "" }, Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard, Now: time.Now,
	})
	kinds := slices.Concat(network.Kinds(), []*apply.Kind{volume.Kind(), vm.Kind()})
	require.Len(t, kinds, len(flags))
	for _, k := range kinds {
		var got []string
		c, _ := k.New(s)
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Shorthand != "f" {
				got = append(got, f.Name)
			}
		})
		want := flags[k.Names[0]]
		require.ElementsMatch(t, strings.Fields(want.compared+" "+want.onlyNew), got, k.Names[0])
	}
}
