package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Defaults of health checks.
const (
	defaultInterval  = 10 // seconds
	defaultUnhealthy = 3
	defaultHealthy   = 2
)

func serviceToProto(s *cloud.ServiceIP) *networkv1.ServiceIp {
	out := &networkv1.ServiceIp{
		Id: string(s.ID), Name: s.Name, OrgId: string(s.Org), ProjectId: string(s.Project), VpcId: string(s.VPC),
		SubnetId: string(s.Subnet),
		Address:  s.Address.String(), Affinity: networkv1.Affinity(s.Affinity), Description: s.Description,
		Status: networkv1.Status(s.Status), StatusReason: s.StatusReason, CreatedAt: int64(s.CreatedAt),
		UpdatedAt: int64(s.UpdatedAt),
		Selector:  s.Selector,
	}
	for _, p := range s.Ports {
		protocol := "tcp"
		if p.Protocol == cloud.ProtocolUDP {
			protocol = "udp"
		}
		out.Ports = append(out.Ports, &networkv1.ServicePort{Name: p.Name, Protocol: protocol, Port: uint32(p.Port), TargetPort: uint32(p.Target)})
	}
	for _, b := range s.Backends {
		out.Backends = append(out.Backends, &networkv1.Backend{PortId: string(b.Port), Address: addressText(b.Address), Weight: b.Weight, Healthy: b.Healthy, Checked: b.Checked})
	}
	if h := s.Health; h != nil {
		out.HealthCheck = &networkv1.HealthCheck{
			Protocol: "tcp", Port: uint32(h.Port), Path: h.HTTPPath, IntervalSeconds: h.IntervalSeconds,
			UnhealthyThreshold: h.Unhealthy, HealthyThreshold: h.Healthy,
		}
		if h.HTTPPath != "" {
			out.HealthCheck.Protocol = "http"
		}
	}
	return out
}

// serviceRequest is implemented by the requests that create and update a service IP.
type serviceRequest interface {
	GetPorts() []*networkv1.ServicePort
	GetBackends() []*networkv1.Backend
	GetSelector() map[string]string
	GetHealthCheck() *networkv1.HealthCheck
	GetAffinity() networkv1.Affinity
}

// serviceFrom converts the parts of a request that CreateServiceIp and UpdateServiceIp have in common.
func serviceFrom(in serviceRequest) (s cloud.ServiceIP, err error) {
	switch in.GetAffinity() {
	case networkv1.Affinity_AFFINITY_UNSPECIFIED, networkv1.Affinity_AFFINITY_NONE:
		s.Affinity = cloud.AffinityNone
	case networkv1.Affinity_AFFINITY_CLIENT_IP:
		s.Affinity = cloud.AffinityClientIP
	default:
		return s, fault.Invalid("affinity", "must be NONE or CLIENT_IP").With("constraint", "enum")
	}
	for _, p := range in.GetPorts() {
		port, err := servicePortFrom(p)
		if err != nil {
			return s, err
		}
		s.Ports = append(s.Ports, port)
	}
	for _, b := range in.GetBackends() {
		backend := cloud.Backend{Port: cloud.PortID(b.GetPortId()), Weight: max(b.GetWeight(), 1)}
		if backend.Address, err = addressOf("backends.address", b.GetAddress()); err != nil {
			return s, err
		}
		s.Backends = append(s.Backends, backend)
	}
	s.Selector = in.GetSelector()
	s.Health, err = healthFrom(in.GetHealthCheck())
	return s, err
}

func servicePortFrom(p *networkv1.ServicePort) (cloud.ServicePort, error) {
	if p.GetPort() > 65535 || p.GetTargetPort() > 65535 {
		return cloud.ServicePort{}, fault.Invalid("ports.port", "must be 1 to 65535").With("constraint", "range")
	}
	out := cloud.ServicePort{Name: p.GetName(), Protocol: protocols[p.GetProtocol()], Port: uint16(p.GetPort()), Target: uint16(p.GetTargetPort())}
	if out.Target == 0 {
		out.Target = out.Port
	}
	return out, nil
}

func healthFrom(h *networkv1.HealthCheck) (*cloud.HealthCheck, error) {
	if h == nil {
		return nil, nil
	}
	out := &cloud.HealthCheck{
		Port: uint16(h.GetPort()), IntervalSeconds: h.GetIntervalSeconds(), Unhealthy: h.GetUnhealthyThreshold(),
		Healthy: h.GetHealthyThreshold(),
	}
	switch {
	case h.GetPort() > 65535:
		return nil, fault.Invalid("health_check.port", "must be at most 65535").With("constraint", "range")
	case h.GetProtocol() == "http":
		if out.HTTPPath = h.GetPath(); out.HTTPPath == "" {
			out.HTTPPath = "/"
		}
	case h.GetProtocol() != "tcp":
		return nil, fault.Invalid("health_check.protocol", "must be tcp or http, got %q", h.GetProtocol()).With("constraint", "enum")
	case h.GetPath() != "":
		return nil, fault.Invalid("health_check.path", "is only for http").With("constraint", "protocol")
	}
	if out.IntervalSeconds == 0 {
		out.IntervalSeconds = defaultInterval
	}
	if out.Unhealthy == 0 {
		out.Unhealthy = defaultUnhealthy
	}
	if out.Healthy == 0 {
		out.Healthy = defaultHealthy
	}
	return out, nil
}

func (r *server) CreateServiceIp(
	ctx context.Context, in *networkv1.CreateServiceIpRequest,
) (*networkv1.ServiceIp, error) {
	t, err := admit(ctx, "CreateServiceIp", in)
	if err != nil {
		return nil, err
	}
	q := ServiceRequest{Subnet: cloud.SubnetID(in.GetSubnetId())}
	if q.Service, err = serviceFrom(in); err != nil {
		return nil, err
	}
	q.Service.Name, q.Service.Description, q.Service.VPC = in.GetName(), in.GetDescription(), cloud.VPCID(in.GetVpcId())
	if q.Address, err = addressOf("address", in.GetAddress()); err != nil {
		return nil, err
	}
	out, err := r.s.CreateServiceIP(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, serviceToProto)
}

func (r *server) GetServiceIp(ctx context.Context, in *networkv1.GetServiceIpRequest) (*networkv1.ServiceIp, error) {
	return getOne(ctx, "GetServiceIp", in, r.s.GetServiceIP, serviceToProto)
}

func (r *server) ListServiceIps(
	ctx context.Context, in *networkv1.ListServiceIpsRequest,
) (*networkv1.ListServiceIpsResponse, error) {
	t, err := admit(ctx, "ListServiceIps", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListServiceIPs(ctx, t, pageOf(in), cloud.VPCID(in.GetVpcId()))
	if err != nil {
		return nil, err
	}
	return &networkv1.ListServiceIpsResponse{ServiceIps: convertAll(all, serviceToProto), NextPageToken: next}, nil
}

func (r *server) UpdateServiceIp(
	ctx context.Context, in *networkv1.UpdateServiceIpRequest,
) (*networkv1.ServiceIp, error) {
	t, err := admit(ctx, "UpdateServiceIp", in)
	if err != nil {
		return nil, err
	}
	q := ServiceUpdate{ID: cloud.ServiceIPID(in.GetId()), Name: in.Name, Description: in.Description}
	if q.Service, err = serviceFrom(in); err != nil {
		return nil, err
	}
	out, err := r.s.UpdateServiceIP(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, serviceToProto)
}

func (r *server) DeleteServiceIp(
	ctx context.Context, in *networkv1.DeleteServiceIpRequest,
) (*networkv1.DeleteServiceIpResponse, error) {
	return deleteOne(ctx, "DeleteServiceIp", in, r.s.DeleteServiceIP, &networkv1.DeleteServiceIpResponse{})
}
