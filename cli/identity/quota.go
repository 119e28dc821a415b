package identity

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"

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
		Example: "  trivet quota set --org acme --vcpus 64 --projects 20\n" +
			"  trivet quota set --org acme --project web --vcpus 8 --memory 16GiB --vms unlimited\n  trivet quota show --org acme",
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(showQuotaCommand(s), setQuotaCommand(s))
	return c
}

func showQuotaCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "show", Short: "Show the usage and the quota of a project or an org", Args: session.Exactly(),
		Long: "Show the usage and the quota of a project or, with --org alone, of an org: of all its projects together."}
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		org, project := s.Tenant()
		q, err := identityv1.NewIdentityServiceClient(conn).GetQuota(ctx, &identityv1.GetQuotaRequest{OrgId: org, ProjectId: project})
		return printQuota(s, q, err)
	})
	return c
}

func setQuotaCommand(s *session.Session) *cobra.Command {
	var limits quotaFlags
	c := &cobra.Command{
		Use: "set", Short: "Set the quota of a project or an org", Args: session.Exactly(),
		Long: `Set the quota of a project or, with --org alone, of an org: what all its projects may use together. A limit is a
number, or "unlimited". Limits without a flag stay as they are. A limit below the usage removes nothing; it only
refuses additions. --projects is for orgs, and "default" is 100 projects.`,
		Example: "  trivet quota set --org acme --vcpus 64 --projects 20\n" +
			"  trivet quota set --org acme --project web --vcpus 8 --memory 16GiB\n  trivet quota set --org acme --project web --vms unlimited",
	}
	limits.add(c.Flags(), orgQuota)
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		if !limits.Given() {
			return session.Usagef("nothing to set: give --vcpus, --memory, --storage, --vms, --images or --projects")
		}
		if err := limits.Change(&identityv1.Quota{}); err != nil {
			return err // report an invalid flag before any call
		}
		org, project := s.Tenant()
		if project != "" && c.Flags().Changed(projectsResource.name) {
			return session.Usagef("--projects limits an org: name it with --org, without --project")
		}
		client := identityv1.NewIdentityServiceClient(conn)
		was, err := client.GetQuota(ctx, &identityv1.GetQuotaRequest{OrgId: org, ProjectId: project})
		if err != nil {
			return err
		}
		wanted := was.GetQuota()
		if wanted == nil {
			wanted = &identityv1.Quota{}
		}
		if err := limits.Change(wanted); err != nil {
			return err
		}
		q, err := client.SetQuota(ctx, &identityv1.SetQuotaRequest{OrgId: org, ProjectId: project, Quota: wanted})
		return printQuota(s, q, err)
	})
	return c
}

func printQuota(s *session.Session, q *identityv1.QuotaStatus, err error) error {
	if err != nil {
		return err
	}
	return s.Print(q, []string{cmp.Or(q.GetProjectId(), q.GetOrgId())}, func(w io.Writer) error {
		header, name, of := "PROJECT", q.GetOrgId()+"/"+q.GetProjectId(), projectQuota
		if q.GetProjectId() == "" {
			header, name, of = "ORG", q.GetOrgId(), orgQuota
		}
		var rows [][]string
		for _, r := range of {
			limit := r.absent
			if limit == projectsResource.absent {
				limit = "100 (default)"
			}
			if l := *r.limit(quotaOrEmpty(q.GetQuota())); l != nil {
				limit = r.text(*l)
			}
			rows = append(rows, []string{name, r.name, r.text(r.used(q.GetUsed())), limit})
		}
		return show.Rows(w, []string{header, "RESOURCE", "USED", "LIMIT"}, rows)
	})
}

func quotaOrEmpty(q *identityv1.Quota) *identityv1.Quota {
	if q == nil {
		return &identityv1.Quota{}
	}
	return q
}

// quotaResource describes a resource that a quota limits: its flag, its unit, and its fields in the API.
type quotaResource struct {
	name, usage string
	// absent is the word on the command line and in the output for a limit that is not set.
	absent string
	// unit is the unit of the limit in the API, session.MiB or session.GiB; 0 if the limit is a count of objects.
	unit  uint64
	limit func(*identityv1.Quota) **uint64
	used  func(*identityv1.Usage) uint64
}

var projectQuota = []quotaResource{
	{"vcpus", "virtual CPUs", unlimited, 0, func(q *identityv1.Quota) **uint64 { return &q.Vcpus }, (*identityv1.Usage).GetVcpus},
	{"memory", "memory of VMs in MiB, or with a unit: 16GiB", unlimited, session.MiB,
		func(q *identityv1.Quota) **uint64 { return &q.MemoryMib }, (*identityv1.Usage).GetMemoryMib},
	{"storage", "disks in GiB, or with a unit: 2TiB", unlimited, session.GiB,
		func(q *identityv1.Quota) **uint64 { return &q.StorageGib }, (*identityv1.Usage).GetStorageGib},
	{"vms", "VMs", unlimited, 0, func(q *identityv1.Quota) **uint64 { return &q.Vms }, (*identityv1.Usage).GetVms},
	{"images", "images", unlimited, 0, func(q *identityv1.Quota) **uint64 { return &q.Images }, (*identityv1.Usage).GetImages},
}

// projectsResource is the number of projects, which only the quota of an org limits.
var projectsResource = quotaResource{"projects", "projects of an org", "default", 0, func(q *identityv1.Quota) **uint64 { return &q.Projects }, (*identityv1.Usage).GetProjects}

// orgQuota lists the resources that the quota of an org limits.
var orgQuota = append([]quotaResource{projectsResource}, projectQuota...)

// text formats n, an amount in r.unit, in the largest unit in which it is a whole number, such as "16 GiB".
func (r *quotaResource) text(n uint64) string {
	if r.unit == 0 || n == 0 {
		return strconv.FormatUint(n, 10)
	}
	units := []string{"MiB", "GiB", "TiB"}
	if r.unit == session.GiB {
		units = units[1:]
	}
	for len(units) > 1 && n%1024 == 0 {
		n, units = n/1024, units[1:]
	}
	return strconv.FormatUint(n, 10) + " " + units[0]
}

func (r *quotaResource) read(text string) (*uint64, error) {
	if text == r.absent {
		return nil, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	ok := err == nil
	if r.unit != 0 {
		n, ok = session.Amount(text, r.unit)
	}
	if !ok {
		return nil, session.Usagef("--%s %q: want %s, or %q", r.name, text, r.wanted(), r.absent)
	}
	return &n, nil
}

func (r *quotaResource) wanted() string {
	switch r.unit {
	case session.MiB:
		return "a number of MiB, or one with a unit: 16GiB"
	case session.GiB:
		return "a number of GiB, or one with a unit: 2TiB"
	}
	return fmt.Sprintf("a number of %s", r.usage)
}
