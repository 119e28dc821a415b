// Package explain formats an error for the user, with a hint about what the user can do.
//
// It handles gRPC statuses with their google.rpc details, and the errors of package dial. It makes no calls. It escapes
// text from the server. Where a message of the server names a request field, it adds the command-line flag for that
// field.
package explain

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/show"
)

// Facts holds what the hints depend on besides the error: properties of the command that failed.
type Facts struct {
	// Source names where the token was read from: a flag or variable such as "--token-file", or SavedLogin. It is empty
	// if there was no token.
	Source string
	// LoggingIn is set for a command that requests a token, such as `trivet login`.
	LoggingIn bool
	// Context is the name of the saved login that --context or TRIVET_CONTEXT selected; empty for the current one.
	Context string
	// Timeout is the time limit of the command.
	Timeout time.Duration
}

// SavedLogin is the value of Facts.Source for a token that `trivet login` saved.
const SavedLogin = "trivet login"

// Error returns the text to print for err: the message, and hints on further lines.
func Error(err error, f Facts) string {
	var unreachableErr *dial.Unreachable
	var lost *dial.Unavailable
	var st interface{ GRPCStatus() *status.Status }
	switch {
	case errors.Is(err, context.Canceled):
		return "interrupted"
	case errors.As(err, &unreachableErr):
		return unreachable(unreachableErr)
	case errors.As(err, &lost):
		return unavailable(lost)
	case errors.As(err, &st):
		return answer(st.GRPCStatus(), f)
	}
	return lines(err.Error())
}

func unreachable(e *dial.Unreachable) string {
	rows := make([][2]string, len(e.Tried))
	for i, t := range e.Tried {
		rows[i] = [2]string{t.Endpoint, t.Why}
	}
	return lines("no control plane can be reached", table(rows),
		"give an endpoint with --endpoint or TRIVET_ENDPOINT, and check that trivet-controlplane runs there")
}

func unavailable(e *dial.Unavailable) string {
	text := e.Endpoint + ": " + status.Convert(e.Err).Message()
	if e.Doubtful {
		return lines(text, "the call may have been carried out or not: check before you repeat it")
	}
	return lines(text, "try again in a moment; `trivet cluster status` shows which members are reachable")
}

// answer returns the text for a gRPC status, which may come from a member or from the gRPC client itself.
func answer(s *status.Status, f Facts) string {
	message := s.Message()
	info, field := details(s)
	switch s.Code() {
	case codes.Unauthenticated:
		if f.Source == "" && !f.LoggingIn {
			message = "you are not logged in"
		}
		if info.GetReason() == notLinked {
			return lines(message, fmt.Sprintf("ask an administrator to run `trivet user link USER --provider %s --subject %s`",
				quoted(info.GetMetadata()["provider"]), quoted(info.GetMetadata()["subject"])))
		}
		return lines(message, unauthenticated(f))
	case codes.PermissionDenied:
		return lines(message, denied(info))
	case codes.NotFound:
		if info.GetReason() == "TENANT_NOT_FOUND" {
			return lines(message, "`trivet project list` shows the projects that you have a role in")
		}
	case codes.InvalidArgument:
		return lines(invalid(message, field)...)
	case codes.FailedPrecondition:
		if info.GetReason() == "IN_USE" {
			return lines(message, "delete or detach what uses it first; the commands accept these IDs")
		}
	case codes.ResourceExhausted:
		return lines(message, reasons(info))
	case codes.Internal:
		if info != nil {
			return lines(message, "this is a fault of the control plane: search its log for the request ID")
		}
	case codes.Unimplemented:
		if info == nil {
			return lines(message, "the endpoint does not know this call: it is not a Trivet control plane, or has another version")
		}
	case codes.DeadlineExceeded:
		if info == nil {
			return lines(fmt.Sprintf("not done within %v", f.Timeout),
				"the call may still be carried out; --timeout sets a longer deadline")
		}
	case codes.Canceled:
		return "interrupted"
	case codes.Unavailable:
		return lines(message, "try again in a moment")
	case codes.Aborted, codes.OutOfRange:
		return lines(message, "try again")
	}
	return lines(message)
}

// denied returns a hint about what the user can do after a PERMISSION_DENIED error, depending on the error's reason.
func denied(info *errdetails.ErrorInfo) string {
	switch info.GetReason() {
	case "TOKEN_SCOPE":
		return "`trivet login --org= --project=` gets a token for every project in which you have a role; then choose one with --org and --project"
	case "TENANT_REQUIRED":
		return "name it with --project, or --org, or with TRIVET_PROJECT and TRIVET_ORG; `trivet project list` shows your projects"
	case "NO_ROLE_IN_SCOPE":
		return "log in without --org and --project; then `trivet whoami` shows your roles, and `trivet invitation list` the roles that you are offered"
	}
	return "`trivet whoami` shows your roles; an administrator gives others"
}

// quoted returns word with shell quotes if it needs them, so that a command in a hint can be copied safely.
func quoted(word string) string {
	if word != "" && !strings.ContainsFunc(word, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') && !strings.ContainsRune("._@-", r)
	}) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// notLinked is the reason in the control plane's error for an identity at an OpenID provider that is linked to no user.
const notLinked = "NOT_LINKED"

func unauthenticated(f Facts) string {
	switch {
	case f.LoggingIn:
		return ""
	case f.Source == "":
		return "run " + login(f) + ", or give a token with --token-file or TRIVET_TOKEN"
	case f.Source == SavedLogin:
		return "the login has expired: run " + login(f)
	}
	return "the token given by " + f.Source + " is not accepted: give another, or run `trivet login`"
}

func login(f Facts) string {
	if f.Context != "" {
		return "`trivet login --context " + f.Context + "`"
	}
	return "`trivet login`"
}

func invalid(message, field string) []string {
	if field == "" {
		return []string{message}
	}
	if !strings.Contains(message, field) {
		message = field + ": " + message
	}
	for _, row := range flags {
		if rest, ok := strings.CutPrefix(field, row.field); ok && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			return []string{message + " (" + row.flag + ")", row.hint}
		}
	}
	return []string{message}
}

const tenant = "name the tenant with --org and --project, or with TRIVET_ORG and TRIVET_PROJECT"

// flags lists the command-line flag or argument for each request field, with a hint. The first entry that matches a
// field is used.
var flags = []struct{ field, flag, hint string }{
	{"name", "NAME", ""},
	{"org_id", "--org", tenant},
	{"project_id", "--project", tenant},
	{"labels", "--label", ""},
	{"metadata", "--metadata", ""},
	{"filter", "--filter", "such as: state = RUNNING AND labels.env = \"prod\""},
	{"spec.cpu.vcpus", "--vcpus", ""},
	{"spec.memory", "--memory", ""},
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
	{"rule.remote_cidr", "--from or --to", ""},
	{"routes", "--to or ROUTE", ""},
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
}

func details(s *status.Status) (info *errdetails.ErrorInfo, field string) {
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			info = d
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				field = v.GetField()
			}
		}
	}
	return info, field
}

// maxReasons is the maximum number of hosts that reasons lists, each with the reason why it cannot run the VM.
const maxReasons = 20

func reasons(info *errdetails.ErrorInfo) string {
	all := info.GetMetadata()
	var rows [][2]string
	for _, k := range slices.Sorted(maps.Keys(all)) {
		rows = append(rows, [2]string{k, all[k]})
	}
	text := table(rows[:min(len(rows), maxReasons)])
	if len(rows) > maxReasons {
		text += fmt.Sprintf("\n  and %d more", len(rows)-maxReasons)
	}
	return text
}

func table(rows [][2]string) string {
	width := 0
	for i, r := range rows {
		rows[i] = [2]string{show.Text(r[0]), show.Text(r[1])}
		width = max(width, len(rows[i][0]))
	}
	out := make([]string, len(rows))
	for i, r := range rows {
		out[i] = fmt.Sprintf("  %-*s  %s", width, r[0], r[1])
	}
	return strings.Join(out, "\n")
}

// lines joins all lines of all parts with newlines. It removes empty lines and escapes unprintable characters.
func lines(parts ...string) string {
	var out []string
	for _, part := range parts {
		for line := range strings.SplitSeq(part, "\n") {
			if line != "" {
				out = append(out, show.Text(line))
			}
		}
	}
	return strings.Join(out, "\n")
}
