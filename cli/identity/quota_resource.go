package identity

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/cli/session"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// quotaResource describes a resource that a quota limits: its flag, its unit, and its fields in the API.
type quotaResource struct {
	name, usage string
	// byDefault is the limit if none is set; 0 if the resource is then unlimited.
	byDefault uint64
	// unit is the unit of the limit in the API, session.MiB or session.GiB; 0 if the limit is a count of objects.
	unit  uint64
	limit func(*identityv1.Quota) **uint64
	used  func(*identityv1.Usage) uint64
}

// computeQuota lists the limits of VMs and images, which are unlimited by default.
var computeQuota = []quotaResource{
	{"vcpus", "virtual CPUs", 0, 0, func(q *identityv1.Quota) **uint64 { return &q.Vcpus }, (*identityv1.Usage).GetVcpus},
	{"memory", "memory of VMs in MiB, or with a unit: 16GiB", 0, session.MiB,
		func(q *identityv1.Quota) **uint64 { return &q.MemoryMib }, (*identityv1.Usage).GetMemoryMib},
	{"storage", "disks in GiB, or with a unit: 2TiB", 0, session.GiB,
		func(q *identityv1.Quota) **uint64 { return &q.StorageGib }, (*identityv1.Usage).GetStorageGib},
	{"vms", "VMs", 0, 0, func(q *identityv1.Quota) **uint64 { return &q.Vms }, (*identityv1.Usage).GetVms},
	{"images", "images", 0, 0, func(q *identityv1.Quota) **uint64 { return &q.Images }, (*identityv1.Usage).GetImages},
	{"image-storage", "stored images in MiB, or with a unit: 40GiB", 0, session.MiB,
		func(q *identityv1.Quota) **uint64 { return &q.ImageMib }, (*identityv1.Usage).GetImageMib},
}

// networkQuota lists the limits of network resources of a project. Those of an org are unlimited by default.
var networkQuota = []quotaResource{
	{name: "vpcs", usage: "VPCs", byDefault: 20,
		limit: func(q *identityv1.Quota) **uint64 { return &q.Vpcs }, used: (*identityv1.Usage).GetVpcs},
	{name: "subnets", usage: "subnets", byDefault: 200,
		limit: func(q *identityv1.Quota) **uint64 { return &q.Subnets }, used: (*identityv1.Usage).GetSubnets},
	{name: "ports", usage: "ports", byDefault: 10_000,
		limit: func(q *identityv1.Quota) **uint64 { return &q.Ports }, used: (*identityv1.Usage).GetPorts},
	{name: "security-groups", usage: "security groups", byDefault: 500,
		limit: func(q *identityv1.Quota) **uint64 { return &q.SecurityGroups }, used: (*identityv1.Usage).GetSecurityGroups},
	{name: "floating-ips", usage: "floating IPs", byDefault: 20,
		limit: func(q *identityv1.Quota) **uint64 { return &q.FloatingIps }, used: (*identityv1.Usage).GetFloatingIps},
	{name: "service-ips", usage: "service IPs", byDefault: 200,
		limit: func(q *identityv1.Quota) **uint64 { return &q.ServiceIps }, used: (*identityv1.Usage).GetServiceIps},
}

// volumeQuota lists the limits of the volumes of a project. Those of an org are unlimited by default.
var volumeQuota = []quotaResource{
	{name: "volumes", usage: "volumes", byDefault: 1000,
		limit: func(q *identityv1.Quota) **uint64 { return &q.Volumes }, used: (*identityv1.Usage).GetVolumes},
	{name: "snapshots", usage: "snapshots of volumes", byDefault: 10_000,
		limit: func(q *identityv1.Quota) **uint64 { return &q.Snapshots }, used: (*identityv1.Usage).GetSnapshots},
	{name: "volume-storage", usage: "volumes in GiB, or with a unit: 2TiB", unit: session.GiB,
		limit: func(q *identityv1.Quota) **uint64 { return &q.VolumeGib }, used: (*identityv1.Usage).GetVolumeGib},
}

// projectsResource is the number of projects, which only the quota of an org limits.
var projectsResource = quotaResource{name: "projects", usage: "projects of an org", byDefault: 100,
	limit: func(q *identityv1.Quota) **uint64 { return &q.Projects }, used: (*identityv1.Usage).GetProjects}

// projectQuota lists the resources that the quota of a project limits.
var projectQuota = slices.Concat(computeQuota, networkQuota, volumeQuota)

// orgQuota lists the resources that the quota of an org limits.
var orgQuota = slices.Concat([]quotaResource{projectsResource}, computeQuota, withoutDefaults(networkQuota), withoutDefaults(volumeQuota))

func withoutDefaults(of []quotaResource) []quotaResource {
	all := slices.Clone(of)
	for i := range all {
		all[i].byDefault = 0
	}
	return all
}

// title returns the name of the resource as the name of a field, such as "Image storage".
func (r *quotaResource) title() string {
	switch r.name {
	case "vcpus":
		return "vCPUs"
	case "vms", "vpcs":
		return strings.ToUpper(r.name[:len(r.name)-1]) + "s"
	}
	text := strings.ReplaceAll(strings.ReplaceAll(r.name, "-", " "), " ips", " IPs")
	return strings.ToUpper(text[:1]) + text[1:]
}

// absent is the word on the command line for a limit that is not set.
func (r *quotaResource) absent() string {
	if r.byDefault > 0 {
		return byDefault
	}
	return unlimited
}

// limitText formats the limit of the resource in a quota, such as "16 GiB" or "20 (default)".
func (r *quotaResource) limitText(q *identityv1.Quota) string {
	if l := *r.limit(q); l != nil {
		return r.text(*l)
	}
	if r.byDefault > 0 {
		return r.text(r.byDefault) + " (default)"
	}
	return unlimited
}

// orgLimitText is limitText for the quota of an org, which has no default limits of what its projects use.
func (r *quotaResource) orgLimitText(q *identityv1.Quota) string {
	if l := *r.limit(q); l != nil {
		return r.text(*l)
	}
	return unlimited
}

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
	if text == r.absent() {
		return nil, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	ok := err == nil
	if r.unit != 0 {
		n, ok = session.Amount(text, r.unit)
	}
	if !ok {
		return nil, session.Usagef("--%s %q: want %s, or %q", r.name, text, r.wanted(), r.absent())
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
