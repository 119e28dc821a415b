package firewall

import (
	"fmt"
	"strings"

	"sigs.k8s.io/knftables"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Text returns the wanted state of a VPC as the input of sysctl, nft, ipset and iptables-restore with which an operator
// would create it in an empty network namespace. Equal states have equal texts. Trusted is as in Options.
func Text(vpc cloud.HostVPC, trusted []string) (string, error) {
	want, err := render(&vpc, trusted)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("# sysctl\n")
	for _, s := range sysctls() {
		fmt.Fprintf(&b, "%s = %s\n", strings.ReplaceAll(s.name, "/", "."), s.value)
	}
	b.WriteString("\n# ipset\n")
	for _, set := range want.sets {
		version := "inet"
		if set.ipv6 {
			version = "inet6"
		}
		fmt.Fprintf(&b, "create %s %s family %s maxelem %d\n", set.name, setType, version, maxElements)
		for _, a := range set.addresses {
			fmt.Fprintf(&b, "add %s %s\n", set.name, a)
		}
	}
	for i, name := range []string{"iptables", "ip6tables"} {
		fmt.Fprintf(&b, "\n# %s\n%s", name, restoreText(kernelTable{}, want.tables[i]))
		for _, hook := range hooks {
			fmt.Fprintf(&b, "-I %s 1 -j %s\n-P %s DROP\n", hook.builtin, hook.target, hook.builtin)
		}
	}
	tx := knftables.NewFake(knftables.BridgeFamily, bridgeTableName).NewTransaction()
	createBridge(tx, want.bridge)
	b.WriteString("\n# nft\n" + tx.String())
	return b.String(), nil
}
