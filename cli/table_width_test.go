package main

import (
	"bytes"
	"context"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// anyID is the ID of every object in the responses of fullCloud, so that each ID that a command looks up has a name.
const anyID = "0192f0c1-9d3c-7a51-8f2b-6f1c5a3e7d20"

// fullCloud serves every unary call of every service, and every stream with one message. All fields of its responses have
// realistic values: names of 16 characters, times, and numbers with several digits.
func fullCloud(t *testing.T) func(context.Context, string) (net.Conn, error) {
	l := bufconn.Listen(1 << 16)
	s := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		full, _ := grpc.MethodFromServerStream(stream)
		service, method, _ := strings.Cut(strings.TrimPrefix(full, "/"), "/")
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + method))
		if err != nil {
			return status.Error(codes.Unimplemented, full)
		}
		of := d.(protoreflect.MethodDescriptor)
		in, err := protoregistry.GlobalTypes.FindMessageByName(of.Input().FullName())
		if err != nil {
			return err
		}
		out, err := protoregistry.GlobalTypes.FindMessageByName(of.Output().FullName())
		if err != nil {
			return err
		}
		if err := stream.RecvMsg(in.New().Interface()); err != nil {
			return err
		}
		m := out.New()
		fill(m, 0)
		return stream.SendMsg(m.Interface())
	}))
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }
}

// fill sets all fields of m, except those that would make a client request further pages.
func fill(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		one := fd.ContainingOneof()
		switch {
		case depth > 6, fd.Name() == "next_page_token", fd.Name() == "more", one != nil && m.WhichOneof(one) != nil:
		case fd.IsMap():
			if fd.MapKey().Kind() == protoreflect.StringKind && fd.MapValue().Kind() == protoreflect.StringKind {
				labels := m.Mutable(fd).Map()
				labels.Set(protoreflect.ValueOfString("env").MapKey(), protoreflect.ValueOfString("production"))
				labels.Set(protoreflect.ValueOfString("tier").MapKey(), protoreflect.ValueOfString("frontend"))
			}
		case fd.IsList() && fd.Kind() == protoreflect.MessageKind:
			fill(m.Mutable(fd).List().AppendMutable().Message(), depth+1)
		case fd.IsList():
			m.Mutable(fd).List().Append(scalarOf(fd))
			if fd.Kind() == protoreflect.StringKind {
				m.Mutable(fd).List().Append(scalarOf(fd))
			}
		case fd.Kind() == protoreflect.MessageKind:
			fill(m.Mutable(fd).Message(), depth+1)
		default:
			m.Set(fd, scalarOf(fd))
		}
	}
}

// scalarOf returns a realistic value for a field.
func scalarOf(fd protoreflect.FieldDescriptor) protoreflect.Value {
	name := string(fd.Name())
	number := numberOf(name)
	switch fd.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		// The longest name.
		values := fd.Enum().Values()
		longest := values.Get(0)
		for i := range values.Len() {
			if v := values.Get(i); len(v.Name()) > len(longest.Name()) && !strings.HasSuffix(string(v.Name()), "_UNSPECIFIED") || longest.Number() == 0 {
				longest = v
			}
		}
		if fd.Enum().FullName() == "network.v1.Status" {
			longest = values.ByName("STATUS_PENDING") // objects that are being deleted are rarely listed
		}
		return protoreflect.ValueOfEnum(longest.Number())
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte("config/frontend"))
	case protoreflect.StringKind:
		if text, ok := fieldTexts[fd.FullName()]; ok {
			return protoreflect.ValueOfString(text)
		}
		return protoreflect.ValueOfString(textOf(name))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(12.5)
	case protoreflect.FloatKind:
		return protoreflect.ValueOfFloat32(12.5)
	case protoreflect.Int32Kind, protoreflect.Sint32Kind:
		return protoreflect.ValueOfInt32(int32(number))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(number))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(number)
	}
	if show.IsTime(fd) {
		return protoreflect.ValueOfInt64(now.Add(-90 * time.Minute).UnixMilli())
	}
	return protoreflect.ValueOfInt64(int64(number))
}

func numberOf(field string) uint64 {
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(field, p) {
				return true
			}
		}
		return false
	}
	switch {
	case has("bytes", "db_size"):
		return 1_234_567_890_123
	case has("mib"):
		return 515_072
	case has("gib"):
		return 12_288
	case has("port"):
		return 30443
	case has("member", "leader", "voters", "learners"):
		return 3
	case has("index", "revision", "balance", "amount", "deposit", "consumed"):
		return 123_456_789
	}
	return 128
}

// texts has the values of fields of type string, by a part of the field's name. The first part that fits counts.
var texts = []struct{ part, text string }{
	{"org_id", "acme-europe"}, {"project_id", "frontend-prod"}, {"user", "ada.lovelace"}, {"principal", "ada.lovelace"}, {"created_by", "ada.lovelace"},
	{"mac", "02:00:0a:64:c8:fa"}, {"ipv6_cidr", "fd12:3456:789a:1::/64"}, {"ipv6", "fd12:3456:789a:1:0:aff:fe64:c8fa"}, {"cidr", "10.100.128.0/20"},
	{"destination", "10.100.128.0/20"}, {"gateway_ip", "10.100.128.1"}, {"client_urls", "https://10.100.200.25:50051"},
	{"address", "10.100.200.250"}, {"ip", "10.100.200.250"},
	{"sha", strings.Repeat("0123456789abcdef", 4)}, {"hash", strings.Repeat("0123456789abcdef", 4)}, {"url", "https://images.example.org/debian/13/debian-13-amd64.qcow2"},
	{"method", "/network.v1.NetworkService/RemoveSecurityGroupRule"}, {"outcome", "PERMISSION_DENIED"}, {"role", "project:member"},
	{"target", "name=frontend-prod-01 org_id=acme-europe project_id=frontend-prod"}, {"device_type", "vm"},
	{"version", "0.12.3"}, {"state", "NOT_READY"}, {"status", "NOT_READY"}, {"wanted", "VOTER"}, {"protocol", "icmpv6"}, {"stage", "destination"},
	{"from", "host-rack7-03"}, {"to", "host-rack7-04"},
}

// fieldTexts has the values of fields whose names do not say what they contain.
var fieldTexts = map[protoreflect.FullName]string{
	"identity.v1.User.id": "ada.lovelace", "identity.v1.Org.id": "acme-europe", "identity.v1.Project.id": "frontend-prod",
	"identity.v1.Group.id": "frontend-admins", "identity.v1.Grant.group_id": "frontend-admins", "identity.v1.User.name": "Ada Lovelace",
	"vmcontroller.v1.Node.name": "host-rack7-03", "operator.v1.HostCapacity.name": "host-rack7-03",
	"operator.v1.Member.state": "VOTER", "operator.v1.Member.name": "controlplane-1", "operator.v1.Member.address": "10.100.200.25:2380",
	"operator.v1.Group.name": "system", "vmcontroller.v1.DiskSpec.id": "disk0", "vmcontroller.v1.NetworkSpec.id": "nic0",
	"operator.v1.HostCapacity.first_waiting": "frontend-prod-01",
}

const sentence = "host host-rack7-03 has 12 vCPUs and 3 GiB of memory free, but the VM needs 16 vCPUs and 64 GiB of memory on one host"

func textOf(field string) string {
	for _, word := range []string{"message", "reason", "description", "explanation", "error", "cause", "about", "waiting"} {
		if strings.Contains(field, word) {
			return sentence
		}
	}
	for _, t := range texts {
		if strings.Contains(field, t.part) && (t.part != "to" && t.part != "from" && t.part != "ip" || field == t.part || strings.HasPrefix(field, t.part+"_")) {
			return t.text
		}
	}
	if field == "id" || strings.HasSuffix(field, "_id") || strings.HasSuffix(field, "_ids") {
		return anyID
	}
	return "frontend-prod-01"
}

var fieldLine = regexp.MustCompile(`^[A-Z][a-z][^|]*: `)

func runFull(t *testing.T, dial func(context.Context, string) (net.Conn, error), args []string) (string, string, int) {
	var out, errs bytes.Buffer
	home := t.TempDir()
	env := map[string]string{"HOME": home, "TRIVET_ENDPOINT": "a", "TRIVET_TOKEN": adminToken, "TRIVET_INSECURE_PLAINTEXT": "1"}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	code := run(ctx, session.Shell{
		Args: args, Env: func(k string) string { return env[k] }, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
		Now: func() time.Time { return now }, Dialer: dial,
	})
	return out.String(), errs.String(), code
}

// widthArgs has the arguments of commands for which an ID for each argument is not enough.
var widthArgs = map[string]string{
	"network explain":        "--from port:frontend-prod-01 --to 10.100.200.251 --port 443",
	"network external show":  "frontend-prod-01",
	"kv lease grant":         "60",
	"kv lease timetolive":    "80",
	"wallet topup":           "5",
	"wallet refund":          "1 5",
	"network nat create":     "frontend-prod-01 --vpc " + anyID,
	"network port create":    "frontend-prod-01 --subnet " + anyID,
	"network rule create":    anyID + " ingress tcp/443",
	"network subnet create":  "frontend-prod-01 --vpc " + anyID + " --cidr 10.0.0.0/24",
	"network vpc create":     "frontend-prod-01 --cidr 10.0.0.0/16",
	"service-account create": "frontend-prod-01 --role project:viewer",
	"snapshot create":        "frontend-prod-01 --volume " + anyID,
	"volume resize":          anyID + " --size 99TiB",
	"vm disk attach":         anyID + " --volume " + anyID,
	"group add":              "frontend-admins ada.lovelace", "group remove": "frontend-admins ada.lovelace",
	"wallet reserve":             "5 --ttl 1h",
	"quota update":               "--vms 5",
	"binding create":             "--user ada.lovelace --role project:member",
	"instance-type create":       "frontend-prod-01 --vcpus 2 --memory 2G",
	"network external create":    "frontend-prod-01 --cidr 192.0.2.0/24 --pool 192.0.2.10-192.0.2.20",
	"network floating-ip create": "frontend-prod-01",
	"network group create":       "frontend-prod-01",
	"network route create":       "frontend-prod-01 --vpc " + anyID,
	"network service-ip create":  "frontend-prod-01 --vpc " + anyID + " --port 443",
}

// notTables lists the commands whose output is not a table, with the reason.
var notTables = []string{
	"kv get", "kv put", "kv del", "kv txn", // keys and values of users are printed as they are
	"vm exec", "vm log", "vm screenshot", // the output of a guest
	"completion", "help", // texts of cobra
	"vm watch", "kv watch", "kv lease keep-alive", "vm console", "vm display", "vm vnc", "vm wait", // they run until they are interrupted
	"token issue", "cluster token", "host token", "cluster backup", "cluster rolling-drain", // they print a token or lines of text
	"binding show", // "Name: value" lines of the binding that flags name
}

// TestTablesFitInto80Columns runs every command that succeeds with an ID for each of its arguments, or with the arguments
// in widthArgs, against a cloud whose names have 16 characters. No line may be longer than 80 characters, except the
// "Name: value" lines of `show` and the output of -o wide.
func TestTablesFitInto80Columns(t *testing.T) {
	t.Chdir(t.TempDir()) // some commands write files into the working directory
	dial := fullCloud(t)
	run := map[string]bool{}
	check := func(name string, args []string) {
		out, errs, code := runFull(t, dial, append(args, "--timeout", "2s"))
		if code != 0 && !strings.Contains(errs, "would be dropped") {
			run[name] = run[name] || false
			return
		}
		run[name] = true
		for line := range strings.Lines(out) {
			line = strings.TrimRight(line, "\n")
			if n := utf8.RuneCountInString(line); n > show.MaxWidth && !fieldLine.MatchString(line) {
				t.Errorf("trivet %s: a line has %d characters:\n%s", strings.Join(args, " "), n, out)
				return
			}
		}
	}
	everyCommand(func(c *cobra.Command) {
		name := strings.TrimPrefix(c.CommandPath(), "trivet ")
		if c.HasSubCommands() || slices.ContainsFunc(notTables, func(n string) bool { return name == n || strings.HasPrefix(name, n+" ") }) {
			return
		}
		args := strings.Fields(name)
		if more, ok := widthArgs[name]; ok {
			args = append(args, strings.Fields(more)...)
		} else {
			for _, w := range strings.Fields(c.Use)[1:] {
				if !strings.HasPrefix(w, "[") {
					args = append(args, anyID)
				}
			}
		}
		if c.Flags().Lookup("yes") != nil {
			args = append(args, "--yes")
		}
		check(name, args)
		if c.Flags().Lookup("all-projects") != nil {
			check(name, append(slices.Clone(args), "--all-projects"))
		}
	})
	for name, ok := range run {
		verb := name[strings.LastIndexByte(name, ' ')+1:]
		if _, given := widthArgs[name]; given || slices.Contains([]string{"list", "show", "status", "capacity", "transactions", "bans", "version"}, verb) {
			if !ok && !strings.HasPrefix(name, "context ") {
				t.Errorf("trivet %s failed, so its table is not checked", name)
			}
		}
	}
}
