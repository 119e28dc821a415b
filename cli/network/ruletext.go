package network

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// ruleColumns returns the columns of a table of rules.
func ruleColumns(l *labels) []list.Column[*networkv1.SecurityGroupRule] {
	type rule = *networkv1.SecurityGroupRule
	return []list.Column[rule]{
		{Name: "RULE", Text: func(r rule) string { return ruleText(r, l) }},
		{Name: "DESCRIPTION", Text: rule.GetDescription, Max: 24},
		{Name: "ID", Text: rule.GetId, In: list.InWide},
	}
}

// ruleText formats a rule in the form that parseRule reads, such as "ingress tcp/443 from 0.0.0.0/0". It marks a rule
// with a remote group that is for IPv6, which parseRule does not read, with ipv6Mark.
func ruleText(r *networkv1.SecurityGroupRule, l *labels) string {
	remote := remoteText(r, l)
	if r.GetRemoteGroupId() != "" && r.GetEthertype() == networkv1.Ethertype_ETHERTYPE_IPV6 {
		remote += ipv6Mark
	}
	if r.GetDirection() == networkv1.Direction_DIRECTION_EGRESS {
		return "egress " + traffic(r) + " to " + remote
	}
	return "ingress " + traffic(r) + " from " + remote
}

// remoteText formats the addresses that a rule permits: a prefix, or group:NAME.
func remoteText(r *networkv1.SecurityGroupRule, l *labels) string {
	if r.GetRemoteGroupId() != "" {
		return groupPrefix + l.of(groups(), r.GetRemoteGroupId())
	}
	if r.GetEthertype() == networkv1.Ethertype_ETHERTYPE_IPV6 {
		return cmp.Or(r.GetRemoteCidr(), "::/0")
	}
	return cmp.Or(r.GetRemoteCidr(), "0.0.0.0/0")
}

// traffic formats the protocol and ports of a rule in the form that parseTraffic reads.
func traffic(r *networkv1.SecurityGroupRule) string {
	protocol := cmp.Or(r.GetProtocol(), "any")
	switch {
	case r.IcmpType != nil && r.IcmpCode != nil:
		return fmt.Sprintf("%s/%d:%d", protocol, r.GetIcmpType(), r.GetIcmpCode())
	case r.IcmpType != nil:
		return fmt.Sprintf("%s/%d", protocol, r.GetIcmpType())
	case r.GetPortMin() == 0 && r.GetPortMax() == 0:
		return protocol
	case r.GetPortMin() == r.GetPortMax():
		return fmt.Sprintf("%s/%d", protocol, r.GetPortMin())
	}
	return fmt.Sprintf("%s/%d-%d", protocol, r.GetPortMin(), r.GetPortMax())
}

const (
	groupPrefix = "group:"
	ipv6Mark    = " (IPv6)"
	ruleForm    = "ingress PROTOCOL [from CIDR|group:NAME], or egress PROTOCOL [to CIDR|group:NAME]"
	trafficForm = `tcp, udp or sctp with a port or a range, such as tcp/443 or udp/5000-5100; icmp or icmpv6, also with a type and code,
such as icmp/8 or icmp/3:4; the number of another protocol; or any`
)

// ruleSpec is a rule as given on the command line. Its remote group is a name or an ID.
type ruleSpec struct {
	ipv6 bool
	// dashes precedes "from" and "to" in errors. It is "--" if they are flags, and otherwise empty.
	dashes string
	parsed *networkv1.SecurityGroupRule
	// group is the remote group; empty for none.
	group string
}

// parseRule parses a rule, such as "ingress tcp/443 from 10.0.0.0/8". arg is the flag or argument that it comes from.
func parseRule(arg, text string) (spec ruleSpec, err error) {
	words := strings.Fields(text)
	var from, to string
	switch {
	case len(words) == 4 && words[0] == "ingress" && words[2] == "from":
		from = words[3]
	case len(words) == 4 && words[0] == "egress" && words[2] == "to":
		to = words[3]
	case len(words) != 2:
		return spec, session.Usagef(
			"%s %q: want %s%s", arg, text, map[bool]string{true: "the ID of a rule, or "}[arg == ruleArg], ruleForm,
		)
	}
	if err := spec.parse(words[0], words[1], from, to); err != nil {
		return spec, session.Usagef("%s %q: %v", arg, text, err)
	}
	return spec, nil
}

// parse sets the fields of the rule. At most one of from and to may be set: from for ingress and to for egress.
func (x *ruleSpec) parse(direction, protocol, from, to string) error {
	x.parsed = &networkv1.SecurityGroupRule{}
	flag, remote := "from", from
	switch direction {
	case "ingress":
		x.parsed.Direction = networkv1.Direction_DIRECTION_INGRESS
		if to != "" {
			return session.Usagef("a rule for ingress has a source: give it with --from instead of --to")
		}
	case "egress":
		flag, remote = "to", to
		x.parsed.Direction = networkv1.Direction_DIRECTION_EGRESS
		if from != "" {
			return session.Usagef("a rule for egress has a destination: give it with --to instead of --from")
		}
	default:
		return session.Usagef("%q is not a direction: want ingress or egress", direction)
	}
	if err := parseTraffic(protocol, x.parsed); err != nil {
		return err
	}
	if err := x.parseRemote(x.dashes+flag, remote); err != nil {
		return err
	}
	x.parsed.Ethertype = networkv1.Ethertype_ETHERTYPE_IPV4
	if x.ipv6 || x.parsed.GetProtocol() == "icmpv6" || strings.Contains(x.parsed.GetRemoteCidr(), ":") {
		x.parsed.Ethertype = networkv1.Ethertype_ETHERTYPE_IPV6
	}
	return nil
}

func (x *ruleSpec) parseRemote(flag, text string) error {
	name, isGroup := strings.CutPrefix(text, groupPrefix)
	switch {
	case text == "" || text == "any":
		return nil
	case isGroup && name == "":
		return session.Usagef("%s %q: want the name or ID of a security group after %s", flag, text, groupPrefix)
	case isGroup:
		x.group = name
		return nil
	case isAddress(text):
		text += map[bool]string{false: "/32", true: "/128"}[strings.Contains(text, ":")]
	case !strings.Contains(text, "/"):
		return session.Usagef("%s %q: want a prefix such as 10.0.0.0/16, an address, or %sNAME", flag, text, groupPrefix)
	}
	x.parsed.RemoteCidr = text
	return checkCIDRs(flag, text)
}

// rule returns the rule for a request. It looks up the remote group.
func (x *ruleSpec) rule(ctx context.Context, t *target) (*networkv1.SecurityGroupRule, error) {
	if x.group == "" {
		return x.parsed, nil
	}
	var err error
	x.parsed.RemoteGroupId, err = groups().find(ctx, t, x.group)
	return x.parsed, err
}

var withPorts = []string{"tcp", "udp", "sctp"}

// parseTraffic sets the protocol and ports of a rule from text such as tcp/443. It also accepts 443/tcp.
func parseTraffic(text string, r *networkv1.SecurityGroupRule) error {
	bad := func() error {
		return session.Usagef("PROTOCOL %q: want %s", text, strings.ReplaceAll(trafficForm, "\n", " "))
	}
	protocol, detail, detailed := strings.Cut(text, "/")
	if slices.Contains(withPorts, detail) {
		protocol, detail = detail, protocol
	}
	r.Protocol = protocol
	if _, err := strconv.ParseUint(protocol, 10, 8); err == nil && !detailed {
		return nil
	}
	var ok bool
	switch {
	case slices.Contains(withPorts, protocol) && detailed:
		r.PortMin, r.PortMax, ok = numberRange(detail, "-", 1, 65535)
	case (protocol == "icmp" || protocol == "icmpv6") && detailed:
		var kind, code uint32
		kind, code, ok = numberRange(detail, ":", 0, 255)
		if r.IcmpType = &kind; strings.Contains(detail, ":") {
			r.IcmpCode = &code
		}
	default:
		ok = !detailed &&
			(protocol == "any" || protocol == "icmp" || protocol == "icmpv6" || slices.Contains(withPorts, protocol))
	}
	switch {
	case !ok:
		return bad()
	case r.GetPortMin() > r.GetPortMax():
		return session.Usagef("PROTOCOL %q: the first port is greater than the last", text)
	}
	return nil
}

// numberRange parses one number or two numbers with a separator. For one number, it returns that twice.
func numberRange(text, separator string, least, most uint64) (first, last uint32, ok bool) {
	a, b, two := strings.Cut(text, separator)
	if !two {
		b = a
	}
	x, err := strconv.ParseUint(a, 10, 16)
	y, err2 := strconv.ParseUint(b, 10, 16)
	return uint32(x), uint32(y), err == nil && err2 == nil && min(x, y) >= least && max(x, y) <= most
}
