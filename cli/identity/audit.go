package identity

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
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
	records := &session.List[*identityv1.AuditRecord]{
		Page: func(ctx context.Context, conn *dial.Conn, token string) (_ []*identityv1.AuditRecord, _ string, err error) {
			if token == "" {
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
			req.PageSize, req.PageToken = session.PageSize, token
			page, err := identityv1.NewIdentityServiceClient(conn).ListAuditRecords(ctx, req)
			return page.GetRecords(), page.GetNextPageToken(), err
		},
		Whole: func(all []*identityv1.AuditRecord) proto.Message {
			return &identityv1.ListAuditRecordsResponse{Records: all}
		},
		Name:   (*identityv1.AuditRecord).GetId,
		Header: []string{"TIME", "WHO", "TENANT", "METHOD", "TARGET", "OUTCOME", "FROM", "REQUEST", "MESSAGE"},
		Row: func(r *identityv1.AuditRecord) []string {
			message := r.GetMessage()
			if n := r.GetSuppressed(); n > 0 {
				message = strings.TrimSpace(message + " (and " + strconv.FormatUint(n, 10) + " more like it)")
			}
			return []string{
				show.When(r.GetTime()), r.GetPrincipal(), auditTenant(r), r.GetMethod()[strings.LastIndexByte(r.GetMethod(), '/')+1:], r.GetTarget(),
				r.GetOutcome(), r.GetAddress(), r.GetRequestId(), message,
			}
		},
	}
	c := records.Command(s, &cobra.Command{
		Use: "list", Short: "List audit records, newest first",
		Long: `List audit records, newest first, of the org and project of --org and --project, or else of the login's org. With
--all, or if neither the flags nor the login name an org, list the records of the whole cloud, which requires the
role system:admin. A time is a duration before now, such as 90m or 24h, or a time such as 2026-03-01T12:00:00Z.`,
		Example: `  trivet audit list --since 1h
  trivet audit list --org acme --method DeleteVm --since 720h -o json
  trivet audit list --outcome REFUSED --since 2026-03-01T00:00:00Z --until 2026-03-02T00:00:00Z`,
	}, auditTimeout, nil)
	c.Flags().BoolVar(&all, "all", false, "list the records of every org and project")
	c.Flags().StringVar(&req.Principal, "user", "", "list only calls of this user or service account")
	c.Flags().StringVar(&req.Method, "method", "", "list only calls of this method, such as CreateVm")
	c.Flags().StringVar(&req.Outcome, "outcome", "", "list only this outcome: OK, a gRPC code, or REFUSED for all but OK")
	c.Flags().StringVar(&since, "since", "", "list records from this time on")
	c.Flags().StringVar(&until, "until", "", "list records before this time")
	// Errors are ignored: RegisterFlagCompletionFunc fails only if the flag does not exist or already has a completion.
	_ = c.RegisterFlagCompletionFunc("user", users)
	_ = c.RegisterFlagCompletionFunc("outcome", cobra.FixedCompletions([]string{"OK", "REFUSED"}, cobra.ShellCompDirectiveNoFileComp))
	return c
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
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return now.Add(-ago).UnixMilli(), nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil && at.UnixMilli() > 0 {
		return at.UnixMilli(), nil
	}
	return 0, session.Usagef("--%s %q: want a duration before now, such as 1h, or a time such as 2026-03-01T12:00:00Z", flag, text)
}
