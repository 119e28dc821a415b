package identity

import (
	"cmp"
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// quotaCommand returns the command `trivet quota`.
func quotaCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "quota", Short: "Show and set the quotas of projects and orgs", Args: cobra.NoArgs,
		Long: `Show and set the quota of a project or, with --org alone, of an org: what all its projects may use together. A new
object must fit into both quotas. The project is the token's, or that of --project. A VM counts from its creation to
its deletion, also while it is stopped. Setting a quota requires the role system:admin.`,
		Example: "  trivet quota update --org acme --vcpus 64 --projects 20\n" +
			"  trivet quota update --org acme --project web --vcpus 8 --memory 16GiB --vms unlimited\n  trivet quota show --org acme",
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(showQuotaCommand(s), setQuotaCommand(s))
	return c
}

func showQuotaCommand(s *session.Session) *cobra.Command {
	var standard bool
	c := &cobra.Command{Use: "show", Short: "Show the usage and the quota of a project or an org", Args: session.Exactly(),
		Long: `Show the usage and the quota of a project or, with --org alone, of an org: of all its projects together. With the
quota of a project, those who may read it also see the quota of the org, into which each new object must fit too. With
--default, show the limits that new projects get.`}
	defaultQuotaFlag(c, &standard, "show the limits that new projects get")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		client := identityv1.NewIdentityServiceClient(conn)
		if err := defaultOfCloud(s, standard); err != nil {
			return err
		}
		if standard {
			q, err := client.GetDefaultQuota(ctx, &identityv1.GetDefaultQuotaRequest{})
			return printDefaultQuota(s, q, err)
		}
		org, project := s.Tenant()
		q, err := client.GetQuota(ctx, &identityv1.GetQuotaRequest{OrgId: org, ProjectId: project})
		return printQuota(s, q, err)
	})
	return c
}

// defaultQuotaFlag adds the flag --default, which selects the quota of new projects instead of that of a tenant.
func defaultQuotaFlag(c *cobra.Command, standard *bool, usage string) {
	c.Flags().BoolVar(standard, "default", false, usage)
}

// defaultOfCloud returns a *Usage error if the command selects the quota of new projects and names a tenant too.
func defaultOfCloud(s *session.Session, standard bool) error {
	if standard && (s.Given("org") || s.Given("project")) {
		return session.Usagef("--default is for the new projects of all orgs: give it without --org and --project")
	}
	return nil
}

func setQuotaCommand(s *session.Session) *cobra.Command {
	var limits quotaFlags
	var standard bool
	c := &cobra.Command{
		Use: "update", Short: "Set the quota of a project, of an org or of new projects", Args: session.Exactly(),
		Long: `Set the quota of a project or, with --org alone, of an org: what all its projects may use together. A limit is a
number, or "unlimited". Limits without a flag stay as they are. A limit below the usage removes nothing; it only
refuses additions. --projects is for orgs, and "default" is 100 projects. The limits of network resources cannot be
removed from a project, but "default" sets the ones that a new project has: 20 VPCs, 200 subnets, 10000 ports, 500
security groups, 20 floating IPs and 200 service IPs.

With --default, set the limits that new projects get. Existing projects keep their limits. An org:admin can create
projects with lower limits, not with higher ones.`,
		Example: "  trivet quota update --org acme --vcpus 64 --projects 20\n" +
			"  trivet quota update --org acme --project web --vcpus 8 --memory 16GiB\n  trivet quota update --org acme --project web --vms unlimited\n" +
			"  trivet quota update --default --vcpus 8 --memory 16GiB --vms 10",
	}
	session.Old(c, "set")
	limits.add(c.Flags(), orgQuota)
	for _, r := range networkQuota {
		c.Flags().Lookup(r.name).Usage = "limit of " + r.usage + "; or default for a project, unlimited for an org"
	}
	defaultQuotaFlag(c, &standard, "set the limits that new projects get")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		if !limits.Given() {
			return session.Usagef("nothing to set: give %s", session.Alternatives(limits.Names()...))
		}
		if err := defaultOfCloud(s, standard); err != nil {
			return err
		}
		org, project := s.Tenant()
		if standard {
			org, project = "", ""
		}
		if org == "" || project != "" {
			if c.Flags().Changed(projectsResource.name) {
				return session.Usagef("--projects limits an org: name it with --org, without --project")
			}
			limits.of = projectQuota
		}
		if err := limits.Change(&identityv1.Quota{}); err != nil {
			return err // report an invalid flag before any call
		}
		client := identityv1.NewIdentityServiceClient(conn)
		if standard {
			return setDefaultQuota(ctx, s, client, &limits)
		}
		was, err := client.GetQuota(ctx, &identityv1.GetQuotaRequest{OrgId: org, ProjectId: project})
		if err != nil {
			return err
		}
		wanted := quotaOrEmpty(was.GetQuota())
		if err := limits.Change(wanted); err != nil {
			return err
		}
		q, err := client.SetQuota(ctx, &identityv1.SetQuotaRequest{OrgId: org, ProjectId: project, Quota: wanted})
		return printQuota(s, q, err)
	})
	return c
}

// setDefaultQuota changes those limits of new projects whose flags are given.
func setDefaultQuota(ctx context.Context, s *session.Session, client identityv1.IdentityServiceClient, limits *quotaFlags) error {
	was, err := client.GetDefaultQuota(ctx, &identityv1.GetDefaultQuotaRequest{})
	if err != nil {
		return err
	}
	wanted := quotaOrEmpty(was.GetQuota())
	if err := limits.Change(wanted); err != nil {
		return err
	}
	q, err := client.SetDefaultQuota(ctx, &identityv1.SetDefaultQuotaRequest{Quota: wanted})
	return printDefaultQuota(s, q, err)
}

func printDefaultQuota(s *session.Session, q *identityv1.DefaultQuota, err error) error {
	if err != nil {
		return err
	}
	return s.Print(q, []string{byDefault}, func(w io.Writer) error {
		var rows [][]string
		for _, r := range projectQuota {
			rows = append(rows, []string{r.name, r.limitText(quotaOrEmpty(q.GetQuota()))})
		}
		return show.Rows(w, []string{"RESOURCE", "LIMIT OF NEW PROJECTS"}, rows)
	})
}

// maxQuotaName is the width to which the table of a quota cuts the name of the project.
const maxQuotaName = 20

func printQuota(s *session.Session, q *identityv1.QuotaStatus, err error) error {
	if err != nil {
		return err
	}
	return s.Print(q, []string{cmp.Or(q.GetProjectId(), q.GetOrgId())}, func(w io.Writer) error {
		header, name, of := []string{"PROJECT", "RESOURCE", "USED", "LIMIT"}, q.GetOrgId()+"/"+q.GetProjectId(), projectQuota
		if q.GetProjectId() == "" {
			header[0], name, of = "ORG", q.GetOrgId(), orgQuota
		}
		org := q.GetOrg()
		if org != nil {
			header = append(header, "ORG USED", "ORG LIMIT")
			if s.Form != show.Wide {
				name = show.Shorten(name, maxQuotaName) // so that the six columns fit into 80 characters
			}
		}
		var rows [][]string
		for _, r := range of {
			row := []string{name, r.name, r.text(r.used(q.GetUsed())), r.limitText(quotaOrEmpty(q.GetQuota()))}
			if org != nil {
				row = append(row, r.text(r.used(org.GetUsed())), r.orgLimitText(quotaOrEmpty(org.GetQuota())))
			}
			rows = append(rows, row)
		}
		return show.Rows(w, header, rows)
	})
}

func quotaOrEmpty(q *identityv1.Quota) *identityv1.Quota {
	if q == nil {
		return &identityv1.Quota{}
	}
	return q
}
