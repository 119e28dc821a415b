package tenant

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	projectLimitDesc = prometheus.NewDesc("trivet_project_quota_limit",
		"Limit of the project's quota for each resource. Unlimited resources have no series.",
		[]string{"org", "project", "resource"}, nil)
	projectUsedDesc = prometheus.NewDesc("trivet_project_quota_used",
		"Amount of each resource that the project uses of its quota.", []string{"org", "project", "resource"}, nil)
	orgLimitDesc = prometheus.NewDesc("trivet_org_quota_limit",
		"Limit of the org's quota for each resource, which its projects share. Unlimited resources have no series.",
		[]string{"org", "resource"}, nil)
	orgUsedDesc = prometheus.NewDesc("trivet_org_quota_used",
		"Amount of each resource that all projects of the org together use of the org's quota.", []string{"org", "resource"}, nil)
)

// QuotaCollector exports the quotas and the usage of all projects and orgs, according to the usage records. Only the
// leader exports values, because the labels have names of tenants and the number of series grows with the projects. To
// keep that number small, only those resources have series that are used, or for which the quota of the project or org
// sets a limit. The limit of such a resource includes the defaults, such as DefaultVPCs.
type QuotaCollector struct {
	leads  func() bool
	quotas *store.Expiring[[]quotaSeries]
}

var _ prometheus.Collector = (*QuotaCollector)(nil)

// NewQuotaCollector returns a QuotaCollector of the projects and orgs in s. leads reports whether this member leads.
func NewQuotaCollector(s *store.Store, leads func() bool) *QuotaCollector {
	return &QuotaCollector{leads, store.NewExpiring(s, store.MetricsTTL, readQuotas)}
}

// Describe implements prometheus.Collector.
func (c *QuotaCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{projectLimitDesc, projectUsedDesc, orgLimitDesc, orgUsedDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector. It exports nothing if this member does not lead, or if the records cannot be
// read.
func (c *QuotaCollector) Collect(out chan<- prometheus.Metric) {
	if !c.leads() {
		return
	}
	all, err := c.quotas.Get()
	if err != nil {
		return
	}
	for _, q := range all {
		limit, used, labels := projectLimitDesc, projectUsedDesc, []string{string(q.org), string(q.project), q.resource}
		if q.project == "" {
			limit, used, labels = orgLimitDesc, orgUsedDesc, []string{string(q.org), q.resource}
		}
		out <- prometheus.MustNewConstMetric(used, prometheus.GaugeValue, q.used, labels...)
		if q.limited {
			out <- prometheus.MustNewConstMetric(limit, prometheus.GaugeValue, q.limit, labels...)
		}
	}
}

// quotaSeries has the limit and the usage of one resource, in the units of metrics. The project is empty for an org.
type quotaSeries struct {
	org         cloud.OrgID
	project     cloud.ProjectID
	resource    string
	used, limit float64
	limited     bool // false if the resource has no limit; limit is then 0
}

// readQuotas returns the series of all projects and orgs that are not deleted. It reads each table once, because the
// usage of an org can be the sum of all its projects.
func readQuotas(v *store.View) (out []quotaSeries, err error) {
	projects, _, err := Projects.List(v, 0)
	if err != nil {
		return nil, err
	}
	limits, err := byPath(v, quotas)
	if err != nil {
		return nil, err
	}
	used, err := byPath(v, usages)
	if err != nil {
		return nil, err
	}
	sums := map[cloud.OrgID]map[Kind]Amount{} // the usage of all projects of an org
	for _, r := range projects {
		p := r.Value
		if p.DeletedAt != 0 {
			continue
		}
		if sums[p.Org] == nil {
			sums[p.Org] = map[Kind]Amount{}
		}
		sum := sums[p.Org]
		sum[orgProjects] = sum[orgProjects].Plus(Amount{Projects: 1})
		var all Amount
		for _, kind := range kinds {
			one := used[string(p.ID)+"/"+string(kind)]
			sum[kind], all = sum[kind].Plus(one), all.Plus(one)
		}
		q := limits[string(p.ID)]
		effective := q
		effective.setProjectDefaults()
		out = appendQuotas(out, quotaSeries{org: p.Org, project: p.ID}, q, effective, all)
	}
	orgs, err := readOrgQuotas(v, sums)
	return append(out, orgs...), err
}

// readOrgQuotas returns the series of the orgs that are not deleted. sums has the usage of all projects of an org, which
// is the usage of the kinds for which the org has no usage record.
func readOrgQuotas(v *store.View, sums map[cloud.OrgID]map[Kind]Amount) (out []quotaSeries, err error) {
	orgs, _, err := Orgs.List(v, 0)
	if err != nil {
		return nil, err
	}
	limits, err := byPath(v, orgQuotas)
	if err != nil {
		return nil, err
	}
	used, err := byPath(v, orgUsages)
	if err != nil {
		return nil, err
	}
	for _, r := range orgs {
		o := r.Value
		if o.DeletedAt != 0 {
			continue
		}
		var all Amount
		for _, kind := range orgKinds {
			one, recorded := used[string(o.ID)+"/"+string(kind)]
			if !recorded {
				one = sums[o.ID][kind]
			}
			all = all.Plus(one)
		}
		q := limits[string(o.ID)]
		effective := q
		effective.setOrgDefaults()
		out = appendQuotas(out, quotaSeries{org: o.ID}, q, effective, all)
	}
	return out, nil
}

// byPath returns all records of a table, by their paths with slashes.
func byPath[T any](v *store.View, t store.Table[T]) (map[string]T, error) {
	all, _, err := t.List(v, 0)
	out := make(map[string]T, len(all))
	for _, r := range all {
		out[strings.Join(r.Path, "/")] = *r.Value
	}
	return out, err
}

// appendQuotas appends to out the series of owner, an org or a project. A resource has a series if owner uses some of
// it, or if stored, the quota record, limits it. The limits come from effective: stored, with defaults where unset.
func appendQuotas(out []quotaSeries, owner quotaSeries, stored, effective Quota, used Amount) []quotaSeries {
	out = slices.Grow(out, len(dimensions))
	for _, d := range dimensions {
		n, limit := *d.of(&used), *d.limit(&effective)
		if n == 0 && *d.limit(&stored) == nil {
			continue
		}
		one := owner
		resource, unit := metricUnit(d.name)
		one.resource, one.used, one.limited = resource, float64(n)*unit, limit != nil
		if limit != nil {
			one.limit = float64(*limit) * unit
		}
		out = append(out, one)
	}
	return out
}

// metricUnit returns the value of the label resource for a dimension, and the number of base units in one unit of the
// dimension: sizes are in bytes in metrics, as Prometheus recommends.
func metricUnit(dimension string) (resource string, unit float64) {
	if name, ok := strings.CutSuffix(dimension, "_mib"); ok {
		return name + "_bytes", 1 << 20
	}
	if name, ok := strings.CutSuffix(dimension, "_gib"); ok {
		return name + "_bytes", 1 << 30
	}
	return dimension, 1
}
