package firewall

import (
	"fmt"
	"strings"

	"sigs.k8s.io/knftables"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Text returns the wanted state of a VPC as the input of sysctl, nft, ipset and iptables-restore, and the commands of
// iptables, with which an operator would create it in an empty network namespace. Equal states have equal texts.
func Text(vpc cloud.HostVPC, o Options) (string, error) {
	denied, err := checkDenied(o.Denied)
	if err != nil {
		return "", err
	}
	o.Denied = denied
	want, err := render(&vpc, &o)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("# sysctl\n")
	for _, s := range sysctls(vpc.LooseTCP) {
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
	for i := range want.tables {
		want.tables[i].lists.text(&b)
	}
	for i, name := range []string{"iptables", "ip6tables"} {
		var in restoreInput
		in.addChains(kernelTable{}, want.tables[i])
		fmt.Fprintf(&b, "\n# %s\n%s", name, in.text())
		for _, hook := range hooks {
			fmt.Fprintf(&b, "%s -I %s 1 -j %s\n", name, hook.builtin, hook.target)
			fmt.Fprintf(&b, "%s -P %s DROP\n", name, hook.builtin)
		}
	}
	tx := knftables.NewFake(knftables.BridgeFamily, bridgeTableName).NewTransaction()
	createBridge(tx, want.bridge)
	b.WriteString("\n# nft\n" + tx.String())
	return b.String(), nil
}
