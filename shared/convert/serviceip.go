package convert

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// ServiceIPFrom returns the service IP in a message of the control plane, without its name if the name is not valid in
// DNS. The backends in the message of a service IP with a selector are health reports. It returns an InvalidArgument
// fault if a host cannot use the service IP.
func ServiceIPFrom(in *networkv1.ServiceIp) (s cloud.ServiceIP, err error) {
	s = cloud.ServiceIP{
		ID: cloud.ServiceIPID(in.GetId()), Name: dnsName(in.GetName()),
		Org: cloud.OrgID(in.GetOrgId()), Project: cloud.ProjectID(in.GetProjectId()),
		Description: in.GetDescription(), VPC: cloud.VPCID(in.GetVpcId()), Subnet: cloud.SubnetID(in.GetSubnetId()),
		Affinity: enum[cloud.Affinity](in.GetAffinity()), Selector: in.GetSelector(),
		Status: cloud.NetworkStatus(in.GetStatus()), StatusReason: in.GetStatusReason(),
		CreatedAt: in.GetCreatedAt(), UpdatedAt: in.GetUpdatedAt(),
	}
	if err := checkIDs("id", in.GetId(), "vpc_id", in.GetVpcId()); err != nil {
		return s, err
	}
	if in.GetSubnetId() != "" {
		if err := cloud.CheckUUID("subnet_id", in.GetSubnetId()); err != nil {
			return s, err
		}
	}
	if s.Affinity != cloud.AffinityNone && s.Affinity != cloud.AffinityClientIP {
		return s, fault.Invalid("affinity", "must be NONE or CLIENT_IP, got %d", in.GetAffinity())
	}
	if s.Address, err = cloud.ParseAddr("address", in.GetAddress()); err != nil {
		return s, err
	}
	if !s.Address.Is4() {
		return s, fault.Invalid("address", "must be an IPv4 address, got %s", s.Address)
	}
	for _, p := range in.GetPorts() {
		if p.GetPort() > 65535 || p.GetTargetPort() > 65535 {
			return s, fault.Invalid("ports.port", "must be 1 to 65535")
		}
		s.Ports = append(s.Ports, cloud.ServicePort{
			Name: p.GetName(), Protocol: protocols[p.GetProtocol()],
			Port: uint16(p.GetPort()), Target: uint16(p.GetTargetPort()),
		})
	}
	for _, b := range in.GetBackends() {
		backend := cloud.Backend{
			Port: cloud.PortID(b.GetPortId()), Weight: max(b.GetWeight(), 1),
			Healthy: b.GetHealthy(), Checked: b.GetChecked(),
		}
		if b.GetAddress() != "" {
			if backend.Address, err = cloud.ParseAddr("backends.address", b.GetAddress()); err != nil {
				return s, err
			}
		}
		s.Backends = append(s.Backends, backend)
	}
	if len(s.Selector) > 0 {
		s.Backends, s.Reports = nil, s.Backends
	}
	if h := in.GetHealthCheck(); h != nil {
		if h.GetPort() > 65535 {
			return s, fault.Invalid("health_check.port", "must be at most 65535")
		}
		s.Health = &cloud.HealthCheck{
			HTTPPath: h.GetPath(), Port: uint16(h.GetPort()), IntervalSeconds: h.GetIntervalSeconds(),
			Unhealthy: h.GetUnhealthyThreshold(), Healthy: h.GetHealthyThreshold(),
		}
	}
	return s, s.Check()
}
