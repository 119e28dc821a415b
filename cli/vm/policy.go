package vm

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// policyFlags are the flags of `trivet vm create` and `trivet vm update` for the restart of a VM and for its host. They
// set metadata and labels of the VM.
type policyFlags struct {
	set              *pflag.FlagSet // nil until register is called
	restart, ha      string
	haPriority       uint32
	host             string
	groups           map[string]*string // the values of the flags of groupFlags, by flag
	metadata, labels []string           // the values of --metadata and --label
}

// groupFlags are the flags for groups of VMs, which only `trivet vm create` has, because the labels cannot be changed.
var groupFlags = []struct{ name, label, usage string }{
	{"affinity", cloud.AffinityLabel, "group of VMs that must all be on one host"},
	{"affinity-soft", cloud.AffinitySoftLabel, "group of VMs: hosts with a VM of the group are preferred"},
	{"anti-affinity", cloud.AntiAffinityLabel, "group of VMs of which no two may be on one host"},
	{"anti-affinity-soft", cloud.AntiAffinitySoftLabel, "group of VMs: hosts with fewer VMs of the group are preferred"},
	{"spread", cloud.SpreadLabel, "label of hosts, such as rack: the VMs are spread over its values"},
	{"spread-group", cloud.SpreadGroupLabel, "count only the VMs of this group for --spread; the default is the VMs of the project without --spread-group"},
}

func (f *policyFlags) register(p *pflag.FlagSet) {
	f.set = p
	p.StringVar(&f.restart, "restart-policy", "", "never or on-failure: start the VM again if its process dies, at most 3 times in 10 minutes; the default is never")
	p.StringVar(&f.ha, "ha", "", "restart or none: start the VM on another host if its host is lost; the default is none")
	p.Uint32Var(&f.haPriority, "ha-priority", 0, fmt.Sprintf("0 to %d: VMs with a higher number get another host first; the default is %d", cloud.MaxHAPriority, cloud.DefaultHAPriority))
	p.StringVar(&f.host, "host", "", "the only host on which the VM may be placed, by name or ID")
}

// changed reports whether a flag is given, also with an empty value.
func (f *policyFlags) changed(flag string) bool { return f.set != nil && f.set.Changed(flag) }

// registerGroups adds the flags of groupFlags.
func (f *policyFlags) registerGroups(p *pflag.FlagSet) {
	f.groups = map[string]*string{}
	for _, g := range groupFlags {
		f.groups[g.name] = p.String(g.name, "", g.usage)
	}
}

// metadataPairs returns the values of --metadata with those of the flags, or nil if there are none.
func (f *policyFlags) metadataPairs() (map[string]string, error) {
	out, err := session.Pairs("metadata", f.metadata)
	if err != nil {
		return nil, err
	}
	for _, one := range []struct {
		flag, key, value string
		values           []string
	}{
		{"restart-policy", cloud.RestartPolicy, f.restart, []string{"never", "on-failure"}},
		{"ha", cloud.HighAvailability, f.ha, []string{"restart", "none"}},
		{"ha-priority", cloud.HAPriority, strconv.FormatUint(uint64(f.haPriority), 10), nil},
	} {
		if !f.changed(one.flag) {
			continue
		}
		switch {
		case one.values != nil && !slices.Contains(one.values, one.value):
			return nil, session.Usagef("--%s %q: want %s or %s", one.flag, one.value, one.values[0], one.values[1])
		case one.flag == "ha-priority" && f.haPriority > cloud.MaxHAPriority:
			return nil, session.Usagef("--ha-priority %d: want 0 to %d", f.haPriority, cloud.MaxHAPriority)
		}
		if out, err = addPair(out, one.flag, "metadata", one.key, one.value); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// labelPairs returns the values of --label with those of the flags for groups, or nil if there are none. It does not
// add the label of --host, but returns a *session.Usage error if both --host and this label are given.
func (f *policyFlags) labelPairs() (map[string]string, error) {
	out, err := session.Pairs("label", f.labels)
	if err != nil {
		return nil, err
	}
	for _, g := range groupFlags {
		if value := f.groups[g.name]; value != nil && *value != "" {
			if out, err = addPair(out, g.name, "label", g.label, *value); err != nil {
				return nil, err
			}
		}
	}
	if f.groups != nil && *f.groups["spread-group"] != "" && out[cloud.SpreadLabel] == "" {
		return nil, session.Usagef("--spread-group has no effect without --spread")
	}
	if _, given := out[cloud.NodeSelectorLabel]; given && f.changed("host") {
		return nil, givenTwice("host", "label", cloud.NodeSelectorLabel)
	}
	return out, nil
}

// addPair returns pairs with the pair that a flag sets. It returns a *session.Usage error if pairs, which are the values
// of the flag --of, have the key already.
func addPair(pairs map[string]string, flag, of, key, value string) (map[string]string, error) {
	if _, given := pairs[key]; given {
		return nil, givenTwice(flag, of, key)
	}
	if pairs == nil {
		pairs = map[string]string{}
	}
	pairs[key] = value
	return pairs, nil
}

func givenTwice(flag, of, key string) error {
	return session.Usagef("--%s and --%s %s=… set the same value: give only one of them", flag, of, key)
}

// findHost returns the host of --host, or nil if --host is empty.
func (f *policyFlags) findHost(ctx context.Context, conn *dial.Conn) (*vmv1.Node, error) {
	if f.host == "" {
		return nil, nil
	}
	return node.FindHost(ctx, conn, f.host)
}

// addHost adds the label of --host to the request for a new VM.
func (f *policyFlags) addHost(ctx context.Context, s *session.Session, conn *dial.Conn, req *vmv1.CreateVmRequest) error {
	host, err := f.findHost(ctx, conn)
	if err != nil || host == nil {
		return err
	}
	if req.GetMetadata()[cloud.HighAvailability] == "restart" {
		s.Note("with --host, the VM starts on no other host if %s is lost", host.GetName())
	}
	selector, err := withHost("", host.GetName())
	if err != nil {
		return err
	}
	req.Labels = cloud.Merge(req.GetLabels(), map[string]string{cloud.NodeSelectorLabel: selector})
	return nil
}

// withHost returns the text of a node selector with another host, or without one if name is empty. It keeps the other
// labels of the selector.
func withHost(selector, name string) (string, error) {
	pairs, err := cloud.ParseNodeSelector(selector)
	if err != nil {
		return "", err
	}
	return cloud.FormatNodeSelector(cloud.Merge(pairs, map[string]string{cloud.HostLabel: name})), nil
}

// policyFields returns the names and values with which `trivet vm show` describes the restart of a VM and the choice of
// its host. It also returns the keys of the metadata and labels that the fields describe.
func policyFields(vm *vmv1.VirtualMachine) (fields [][2]string, keys []string) {
	metadata, labels := vm.GetMetadata(), vm.GetLabels()
	restart, lost, described := "never", "stays down", true
	if metadata[cloud.HighAvailability] == "restart" {
		lost, described = afterLoss(vm)
		restart = "on-failure, because of its recovery"
	}
	if metadata[cloud.RestartPolicy] == "on-failure" {
		restart = "on-failure"
	}
	fields = [][2]string{{"Restart policy", restart}, {"If its host is lost", lost}}
	keys = append(keys, cloud.RestartPolicy)
	// If the VM stays down in spite of trivet/ha=restart, the page also shows the metadata, so that the user sees that it is
	// set.
	if described {
		keys = append(keys, cloud.HighAvailability)
		if metadata[cloud.HighAvailability] == "restart" {
			keys = append(keys, cloud.HAPriority)
		}
	}
	if rules := placementRules(labels); len(rules) > 0 {
		fields = append(fields, [2]string{"Placement", strings.Join(rules, ", ")})
		keys = append(keys, cloud.NodeSelectorLabel)
		for _, g := range groupFlags {
			keys = append(keys, g.label)
		}
	}
	return fields, keys
}

// afterLoss describes what happens to a VM with the metadata cloud.HighAvailability if its host is lost. It reports
// whether the VM can start on another host, as far as the command line can know.
func afterLoss(vm *vmv1.VirtualMachine) (text string, starts bool) {
	for _, d := range vm.GetSpec().GetDisks() {
		if d.GetSource().GetVolumeId() == "" {
			return "stays down, because the disk " + d.GetId() + " is on its host only", false
		}
	}
	switch security := vm.GetSpec().GetSecurity(); {
	case security.GetTpm():
		return "stays down, because the state of its TPM is on its host only", false
	case security.GetSecureBoot(), vm.GetMetadata()[cloud.FirmwareKey] == "uefi":
		return "stays down, because the NVRAM of its UEFI firmware is on its host only", false
	}
	selector, _ := cloud.ParseNodeSelector(vm.GetLabels()[cloud.NodeSelectorLabel]) // the control plane has checked it
	if host := selector[cloud.HostLabel]; host != "" {
		return "stays down, because it may be placed on " + host + " only", false
	}
	priority := cmp.Or(vm.GetMetadata()[cloud.HAPriority], strconv.Itoa(cloud.DefaultHAPriority))
	return "starts on another host that can use its volumes, with priority " + priority, true
}

// placementRules describes the labels of a VM that restrict the choice of its host.
func placementRules(labels map[string]string) (rules []string) {
	selector, _ := cloud.ParseNodeSelector(labels[cloud.NodeSelectorLabel]) // the control plane has checked it
	if host := selector[cloud.HostLabel]; host != "" {
		rules = append(rules, "only on "+host)
	}
	for _, k := range slices.Sorted(maps.Keys(selector)) {
		if k != cloud.HostLabel {
			rules = append(rules, fmt.Sprintf("on hosts with %s=%s", k, selector[k]))
		}
	}
	for _, one := range []struct{ label, text string }{
		{cloud.AffinityLabel, "on the host of the group %s"},
		{cloud.AffinitySoftLabel, "preferably on a host of the group %s"},
		{cloud.AntiAffinityLabel, "not on a host of the group %s"},
		{cloud.AntiAffinitySoftLabel, "preferably not on a host of the group %s"},
	} {
		if value := labels[one.label]; value != "" {
			rules = append(rules, fmt.Sprintf(one.text, value))
		}
	}
	if over := labels[cloud.SpreadLabel]; over != "" {
		rule := "spread over " + over
		if group := labels[cloud.SpreadGroupLabel]; group != "" {
			rule += " in the group " + group
		}
		rules = append(rules, rule)
	}
	return rules
}
