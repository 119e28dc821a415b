package vpc

import (
	"reflect"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// difference has the parts of the wanted state of a VPC that differ from the state in force. It leaves out the parts
// that only packages firewall and edge read, because these packages compare the parts themselves.
type difference struct {
	remotes  bool // ports on other hosts
	services bool // service IPs
	rest     bool // everything else
}

// differenceOf compares w with last, the state in force. If last is nil, everything differs.
func differenceOf(last, w *wanted) difference {
	if last == nil {
		return difference{true, true, true}
	}
	d := difference{
		services: !reflect.DeepEqual(last.Services, w.Services),
		rest: last.Domain != w.Domain || last.Withhold != w.Withhold ||
			!reflect.DeepEqual(withoutLists(&last.HostVPC), withoutLists(&w.HostVPC)),
	}
	if len(last.Subnets) != len(w.Subnets) {
		return difference{true, d.services, true}
	}
	for i := range w.Subnets {
		a, b := &last.Subnets[i], &w.Subnets[i]
		d.remotes = d.remotes || !equal(a.Remotes, b.Remotes, (*cloud.RemotePort).Equal)
		d.rest = d.rest || !equal(a.Ports, b.Ports, (*cloud.HostPort).Equal)
	}
	return d
}

func equal[T any](a, b []T, same func(x, y *T) bool) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !same(&a[i], &b[i]) {
			return false
		}
	}
	return true
}

// withoutLists returns a copy of v without its ports, its service IPs, and the fields that only packages firewall and
// edge read.
func withoutLists(v *cloud.HostVPC) cloud.HostVPC {
	f := *v
	f.Groups, f.Members, f.Denied, f.LooseTCP = nil, nil, nil, false
	f.NAT, f.Floating, f.Services = nil, nil, nil
	f.Subnets = slices.Clone(v.Subnets)
	for i := range f.Subnets {
		f.Subnets[i].Ports, f.Subnets[i].Remotes = nil, nil
	}
	return f
}
