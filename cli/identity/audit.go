package identity

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	"github.com/trivet-cloud/trivet/shared/filter"
)

// auditTimeout is the deadline of `trivet audit list` unless --timeout is given. It is long because there may be many
// pages.
const auditTimeout = 2 * time.Minute

// auditCommand returns the command `trivet audit`. The argument users is the shell completion for user IDs.
func auditCommand(s *session.Session, users cobra.CompletionFunc) *cobra.Command {
	c := &cobra.Command{
		Use: "audit", Short: "List the audit log: changes and refused calls", Args: cobra.NoArgs,
		Long: `List the audit log: one record for each call that changes something and for each refused call. Records cannot be
changed. A system:admin sees all records, an org:admin the records of the org.`,
		Example: "  trivet audit list --since 1h\n  trivet audit list --user ada --outcome REFUSED",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(listAuditCommand(s, users))
	return c
}

func listAuditCommand(s *session.Session, users cobra.CompletionFunc) *cobra.Command {
	var all bool
	var since, until string
	req := &identityv1.ListAuditRecordsRequest{}
	read := false // whether the flags have been parsed
	records := &list.Kind[*identityv1.AuditRecord]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) (_ []*identityv1.AuditRecord, _ string, err error) {
			if !read {
				read = true
				now := s.Now()
				if req.Since, err = parseAuditTime(now, "since", since); err != nil {
					return nil, "", err
				}
				if req.Until, err = parseAuditTime(now, "until", until); err != nil {
					return nil, "", err
				}
				if req.Until != 0 && req.Since >= req.Until {
					return nil, "", session.Usagef("--since %s is not before --until %s", since, until)
				}
			}
			req.OrgId, req.ProjectId = s.Named()
			switch {
			case all && (s.Given("org") || s.Given("project")):
				return nil, "", session.Usagef("give --all, or --org and --project, not both")
			case all:
				req.OrgId, req.ProjectId = "", ""
			case req.OrgId == "" && req.ProjectId == "":
				req.OrgId, _ = s.Tenant()
			}
			if req.OrgId == "" && req.ProjectId != "" {
				// An org:admin must name the org. A deleted project has none, and only a system:admin reads its records.
				if org, err := orgOfProject(ctx, identityv1.NewIdentityServiceClient(conn), "", req.ProjectId); err == nil {
					req.OrgId = org
				}
			}
			req.PageSize, req.PageToken = q.Size, q.Token
			page, err := identityv1.NewIdentityServiceClient(conn).ListAuditRecords(ctx, req)
			return page.GetRecords(), page.GetNextPageToken(), err
		},
		Name:    (*identityv1.AuditRecord).GetId,
		Columns: auditColumns,
		Words:   map[string][]string{"outcome": outcomes()},
		Fields:  map[string]list.Field{"method": methodField},
		Empty: func(ctx context.Context, conn *dial.Conn) error {
			if req.GetPrincipal() == "" || strings.Contains(req.GetPrincipal(), "@") {
				return nil // the control plane checks the name of a service account
			}
			_, err := identityv1.NewIdentityServiceClient(conn).GetUser(ctx, &identityv1.GetUserRequest{Id: req.GetPrincipal()})
			if status.Code(err) == codes.PermissionDenied {
				return nil // only a system:admin knows which users exist
			}
			return err
		},
	}
	c := records.Command(s, &cobra.Command{
		Use: "list", Short: "List audit records, newest first",
		Long: `List audit records, newest first, of the org and project of --org and --project, or else of the login's org. With
--all, or if neither the flags nor the login name an org, list the records of the whole cloud, which requires the
role system:admin. A time is a duration before now, such as 90m, 24h or 7d, or a time such as 2026-03-01T12:00:00Z. To
continue a list with --page-token, give --since and --until as times: a duration before now is another time by then.

The column TARGET is the name that the object had when it was changed, or the user and the role of a binding. Records of
refused and failed calls have the ID of the object instead. -o wide shows everything that the call named, and the
message, the request ID and the address of the caller.`,
		Example: `  trivet audit list --since 1h
  trivet audit list --org acme --method DeleteVm --since 30d -o json
  trivet audit list --outcome REFUSED --since 2026-03-01T00:00:00Z --until 2026-03-02T00:00:00Z`,
	}, auditTimeout)
	c.Flags().BoolVar(&all, "all", false, "list the records of every org and project")
	c.Flags().StringVar(&req.Principal, "user", "", "list only calls of this user, or of this service account, as NAME@ORG/PROJECT")
	c.Flags().StringVar(&req.Method, "method", "", "list only calls of this method, such as CreateVm")
	c.Flags().StringVar(&req.Outcome, "outcome", "", "list only this outcome: OK, a gRPC code, or REFUSED for all but OK")
	c.Flags().StringVar(&since, "since", "", "list records from this time on")
	c.Flags().StringVar(&until, "until", "", "list records before this time")
	// Errors are ignored: RegisterFlagCompletionFunc fails only if the flag does not exist or already has a completion.
	_ = c.RegisterFlagCompletionFunc("user", users)
	_ = c.RegisterFlagCompletionFunc("outcome", cobra.FixedCompletions([]string{"OK", "REFUSED"}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

// methodField compares the full or the short name of a record's method.
var methodField = filter.Name("CreateVm", isMethod, func(m protoreflect.Message) []string {
	full := m.Interface().(*identityv1.AuditRecord).GetMethod()
	return []string{full, shortMethod(full)}
})

// isMethod reports whether name is a full name of a method, or the short name of a method of an API that this program
// knows.
func isMethod(name string) bool {
	if strings.HasPrefix(name, "/") {
		return true
	}
	found := false
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			found = found || f.Services().Get(i).Methods().ByName(protoreflect.Name(name)) != nil
		}
		return !found
	})
	return found
}

// shortMethod returns the part of a method's full name after the last slash.
func shortMethod(full string) string { return full[strings.LastIndexByte(full, '/')+1:] }

// outcomes returns the possible outcomes of a record: OK, the gRPC codes, and that of a record that counts others.
func outcomes() []string {
	all := []string{"SUPPRESSED"}
	for _, name := range code.Code_name {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}

// maxTarget is the width to which the table of audit records cuts targets.
const maxTarget = 19

func auditColumns(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*identityv1.AuditRecord] {
	type record = *identityv1.AuditRecord
	return []list.Column[record]{
		list.Age("AGE", s.Now, record.GetTime),
		list.Time("TIME", record.GetTime, list.InWide),
		{Name: "USER", Text: func(r record) string { return cmp.Or(r.GetPrincipalUsername(), r.GetPrincipal()) }, Max: 12},
		{Name: "TENANT", Text: auditTenant, In: list.InWide},
		{Name: "METHOD", Text: func(r record) string { return shortMethod(r.GetMethod()) }, Max: 18},
		{Name: "OUTCOME", Text: record.GetOutcome},
		{Name: "TARGET", Text: record.GetTarget, Table: auditTarget, Max: maxTarget},
		{Name: "FROM", Text: record.GetAddress, In: list.InWide},
		{Name: "REQUEST", Text: record.GetRequestId, In: list.InWide},
		{Name: "MESSAGE", Text: auditMessage, In: list.InWide},
	}
}

// auditTarget returns the name of the object that a call changed: the value of object= or name= in the target of a record.
// For a binding, it is the user or the group and the role. Without a name, it is the ID of the object: that of the field
// id, or else the first that is not the ID of an org or a project. For a REST call, it is the last part of the path.
func auditTarget(r *identityv1.AuditRecord) string {
	values, order := map[string]string{}, []string{}
	if text, ok := strings.CutPrefix(r.GetTarget(), "object="); ok {
		if name, err := strconv.QuotedPrefix(text); err == nil { // the name has spaces or equals signs
			name, _ = strconv.Unquote(name)
			return name
		}
	}
	for _, word := range strings.Split(r.GetTarget(), " ") {
		key, value, pair := strings.Cut(word, "=")
		switch {
		case pair:
			values[key] = value
			order = append(order, key)
		case len(order) > 0: // a word of a name with spaces
			values[order[len(order)-1]] += " " + word
		case strings.HasPrefix(word, "/"):
			path, _, _ := strings.Cut(word, "?")
			return path[strings.LastIndexByte(path, '/')+1:]
		}
	}
	if role := values["binding.role"]; role != "" {
		return cmp.Or(values["user_id"], values["group_id"]) + " " + role
	}
	if name := cmp.Or(values["object"], values["name"], values["id"]); name != "" {
		return name
	}
	for _, key := range order {
		if key != "org_id" && key != "project_id" && key != "claims" {
			return values[key]
		}
	}
	return cmp.Or(strings.Trim(values["org_id"]+"/"+values["project_id"], "/"), values["claims"])
}

func auditMessage(r *identityv1.AuditRecord) string {
	if n := r.GetSuppressed(); n > 0 {
		return strings.TrimSpace(r.GetMessage() + " (and " + strconv.FormatUint(n, 10) + " more like it)")
	}
	return r.GetMessage()
}

func auditTenant(r *identityv1.AuditRecord) string {
	if r.GetProjectId() == "" {
		return r.GetOrgId()
	}
	return r.GetOrgId() + "/" + r.GetProjectId()
}

// parseAuditTime parses a duration before now, such as 1h, or an RFC 3339 time. It returns Unix milliseconds, or 0 if
// text is empty. flag is the name of the flag for the error.
func parseAuditTime(now time.Time, flag, text string) (int64, error) {
	if text == "" {
		return 0, nil
	}
	if ago, err := session.ParseDuration(text); err == nil && ago >= 0 {
		return now.Add(-ago).UnixMilli(), nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil && at.UnixMilli() > 0 {
		return at.UnixMilli(), nil
	}
	return 0, session.Usagef("--%s %q: want a duration before now, such as 90m or 7d, or a time such as 2026-03-01T12:00:00Z", flag, text)
}
