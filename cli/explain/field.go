package explain

import (
	"regexp"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const tenant = "name the tenant with --org and --project, or with TRIVET_ORG and TRIVET_PROJECT"

// arguments lists the flags and arguments of the command line for each request field, separated by spaces, with a hint.
// The first one that the command has is used. The first entry that matches a field or its beginning is used. A field
// without an entry, such as min_disk_gib, stands for a flag or an argument of the same name, if the command has it.
var arguments = []struct{ field, names, hint string }{
	{"name", "--name NAME", ""},
	{"trivet-org", "--org", tenant},
	{"trivet-project", "--project", tenant},
	{"org_id", "--org", tenant},
	{"project_id", "--project", tenant},
	{"labels", "--label", ""},
	{"metadata", "--metadata", ""},
	{"filter", "--filter", "such as: state = RUNNING AND labels.env = \"prod\""},
	{"spec.cpu.vcpus", "--vcpus", ""},
	{"spec.memory", "--memory", ""},
	{"memory_mib", "--memory", ""},
	{"root_disk_gib", "--disk", ""},
	{"spec.disks", "--disk", ""},
	{"spec.network", "--network", ""},
	{"nic.id", "--id", ""},
	{"nic.network_id", "--vpc", ""},
	{"nic.subnet_id", "--subnet", ""},
	{"nic.port_id", "--port", ""},
	{"nic.ip_address", "--ip", ""},
	{"nic.mac_address", "--mac", ""},
	{"nic.security_groups", "--group", ""},
	{"nic.model", "--model", ""},
	{"nic_id", "NIC", ""},
	{"spec.boot.kernel", "--kernel", ""},
	{"spec.boot.initrd", "--initrd", ""},
	{"spec.boot.cmdline", "--cmdline", ""},
	{"timeout_seconds", "--grace", ""},
	{"ttl_seconds", "--ttl", ""},
	{"source_url", "FILE", ""},
	{"format", "--format", ""},
	{"os_type", "--os", ""},
	{"os_version", "--os-version", ""},
	{"architecture", "--arch", ""},
	{"min_disk_gib", "--min-disk", ""},
	{"min_memory_mib", "--min-memory", ""},
	{"tail_bytes", "--tail", ""},
	{"amount", "AMOUNT", ""},
	{"actual_amount", "--amount", ""},
	{"initial_balance", "--balance", ""},
	{"reservation_id", "RESERVATION", ""},
	{"resource_type", "--resource-type", ""},
	{"resource_id", "--resource", ""},
	{"description", "--description", ""},
	{"reason", "--reason", ""},
	{"user_id", "USER", ""},
	{"username", "--user", ""},
	{"password", "--password-file", ""},
	{"binding.role", "--role", ""},
	{"binding.org_id", "--org", tenant},
	{"binding.project_id", "--project", tenant},
	{"binding", "--role", ""},
	{"roles", "--role", ""},
	{"size_gib", "--size", ""},
	{"storage_class", "--class", ""},
	{"quota.vcpus", "--vcpus", ""},
	{"quota.memory_mib", "--memory", ""},
	{"quota.storage_gib", "--storage", ""},
	{"quota.vms", "--vms", ""},
	{"quota.images", "--images", ""},
	{"quota.vpcs", "--vpcs", ""},
	{"quota.subnets", "--subnets", ""},
	{"quota.ports", "--ports", ""},
	{"quota.security_groups", "--security-groups", ""},
	{"quota.floating_ips", "--floating-ips", ""},
	{"quota.service_ips", "--service-ips", ""},
	{"quota.volumes", "--volumes", ""},
	{"quota.volume_gib", "--volume-storage", ""},
	{"quota.snapshots", "--snapshots", ""},
	{"quota.image_mib", "--image-storage", ""},
	{"expires_at", "--ttl", ""},
	{"identity.provider", "--provider", ""},
	{"identity.subject", "--subject", ""},
	{"provider", "--provider", ""},
	{"principal", "--user", ""},
	{"method", "--method", ""},
	{"outcome", "--outcome", ""},
	{"since", "--since", ""},
	{"until", "--until", ""},
	{"cidr_block", "--cidr", ""},
	{"ipv6_cidr_block", "--ipv6-cidr", ""},
	{"external_network", "--external", "`trivet network external list` shows the existing ones"},
	{"gateway_ip", "--gateway", ""},
	{"dns_servers", "--dns", ""},
	{"ip_address", "--ip", ""},
	{"ipv6_address", "--ipv6", ""},
	{"mac_address", "--mac", ""},
	{"security_groups", "--group", ""},
	{"allowed_address_pairs", "--allow", ""},
	{"bandwidth_mbps", "--bandwidth", ""},
	{"rules", "--rule", ""},
	{"rule.protocol", "PROTOCOL", ""},
	{"rule.port_min", "PROTOCOL", ""},
	{"rule.port_max", "PROTOCOL", ""},
	{"rule.remote_cidr", "--from --to", ""},
	{"routes", "--to ROUTE", ""},
	{"subnet_ids", "--subnet", ""},
	{"address", "--address", ""},
	{"ports", "--port", ""},
	{"backends", "--backend", ""},
	{"health_check", "--check", ""},
	{"peer_vpc_id", "--peer-vpc", ""},
	{"pools", "--pool", ""},
	{"vlan", "--vlan", ""},
	{"to_address", "--to", ""},
	{"protocol", "--protocol", ""},
	{"key_id", "KEY", ""},
	{"token_id", "--id", ""},
	{"current_password", "--current-password-file", ""},
	{"vm_id", "VM --vm", ""},
	{"image_id", "--image IMAGE", ""},
	{"volume_id", "VOLUME --volume", ""},
	{"snapshot_id", "SNAPSHOT --snapshot", ""},
	{"destination_node_id", "--to", ""},
	{"node_id", "--host HOST", ""},
	{"expected_sha256", "--sha256", ""},
	{"disk.boot_index", "--boot-index", ""},
	{"disk.volume_id", "--volume", ""},
	{"disk.size_gib", "--size", ""},
	{"disk", "--disk DISK", ""},
	{"disk_id", "DISK", ""},
	{"page_size", "--limit", ""},
	{"page_token", "--page-token", ""},
	{"charge_sequence", "SEQUENCE", ""},
	{"id", "--id ORG PROJECT USER", ""},
}

// path matches a request field in a message, such as spec.disks[disk0].size_gib, or the metadata that names the tenant.
var path = regexp.MustCompile(`"[^"]*"|trivet-(?:org|project)\b|[a-z][a-z0-9_]*(?:\[[^\]]*\])?(?:\.[a-z][a-z0-9_]*(?:\[[^\]]*\])?)*`)

// metadata matches the parts of a message that name metadata of a call. The program sets such metadata from flags.
var metadata = regexp.MustCompile(`, or the metadata trivet-(?:org|project),|\bthe metadata (?:trivet-(?:org|project))`)

// flagNames replaces the request fields in a message by flags and arguments of the command. The parameter field is the
// invalid field, or empty; if the message does not begin with it or name it, flagNames adds it. A field whose name is a
// common word, such as name, is replaced only at the beginning of the message. Of the other words, flagNames takes only
// those with an underscore or a dot for fields, and none between double quotes. In a message about a filter, other words
// are fields of the listed objects, which have no flags.
func flagNames(message, field string, f Facts) string {
	message = metadata.ReplaceAllStringFunc(message, func(text string) string {
		if strings.HasPrefix(text, ",") {
			return ""
		}
		return strings.TrimPrefix(text, "the metadata ")
	})
	named := field == ""
	var b strings.Builder
	end := 0
	for _, at := range path.FindAllStringIndex(message, -1) {
		word := message[at[0]:at[1]]
		common := !strings.ContainsAny(word, "_.-")
		switch {
		case word[0] == '"', word != field && (field == "filter" || common):
			continue
		case common && (at[0] > 0 || !strings.HasPrefix(message[at[1]:], ":")):
			continue
		}
		named = named || word == field
		b.WriteString(message[end:at[0]] + argument(word, f))
		end = at[1]
	}
	message = b.String() + message[end:]
	if !named {
		message = argument(field, f) + ": " + message
	}
	return message
}

// argument returns the flag or argument for a request field, such as --disk disk0 for spec.disks[disk0].size_gib, or
// the field if there is none.
func argument(field string, f Facts) string {
	has := func(name string) bool {
		if flag, ok := strings.CutPrefix(name, "--"); ok {
			return f.HasFlag == nil || f.HasFlag(flag)
		}
		return f.Use == "" || strings.Contains(f.Use, name)
	}
	for _, row := range arguments {
		rest, ok := strings.CutPrefix(field, row.field)
		if !ok || rest != "" && rest[0] != '.' && rest[0] != '[' {
			continue
		}
		for name := range strings.FieldsSeq(row.names) {
			if has(name) {
				return name + element(rest)
			}
		}
	}
	last := field[strings.LastIndexByte(field, '.')+1:]
	if f.HasFlag != nil && f.HasFlag(strings.ReplaceAll(last, "_", "-")) {
		return "--" + strings.ReplaceAll(last, "_", "-")
	}
	return field
}

// element returns the key of a list element in the rest of a field, such as " disk0" for [disk0].size_gib.
func element(rest string) string {
	if !strings.HasPrefix(rest, "[") {
		return ""
	}
	key, _, _ := strings.Cut(rest[1:], "]")
	return " " + key
}

// fieldHint returns the hint for an invalid request field, or "" if there is none.
func fieldHint(field string) string {
	for _, row := range arguments {
		if rest, ok := strings.CutPrefix(field, row.field); ok && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			return row.hint
		}
	}
	return ""
}

// TenantMissing reports whether an error is INVALID_ARGUMENT for org_id or project_id. The control plane returns this
// error if a call names no org or project and the caller has roles in all of them.
func TenantMissing(err error) bool {
	s, ok := status.FromError(err)
	if !ok || s.Code() != codes.InvalidArgument {
		return false
	}
	_, field, _ := details(s)
	return field == "org_id" || field == "project_id"
}

// TenantRequired reports whether an error is PERMISSION_DENIED because the call names no org or project. The control plane
// returns this error if the call would be admitted for an org or a project, but the caller has no default.
func TenantRequired(err error) bool {
	s, ok := status.FromError(err)
	if !ok || s.Code() != codes.PermissionDenied {
		return false
	}
	info, _, _ := details(s)
	return info.GetReason() == "TENANT_REQUIRED"
}
