package cloud

import "net/netip"

// HostService is a service IP of a VPC as a host needs it. Each host distributes the connections that its own ports
// open to the address.
type HostService struct {
	ID ServiceIPID
	// Name is the name in DNS, without a domain. It may be empty.
	Name string
	// Address is an IPv4 address of a subnet. No device has it.
	Address netip.Addr
	// Floating is the floating IP of the service IP. It is invalid if the service IP has none.
	Floating netip.Addr
	Ports    []ServicePort
	Affinity Affinity
	// Health is nil without a health check. All backends are healthy then.
	Health   *HealthCheck
	Backends []HostBackend
}

// HostBackend is a backend of a HostService.
type HostBackend struct {
	// Address is the IPv4 address to which connections go.
	Address netip.Addr
	// Port is the port that the record names as backend. It is empty if the record names an address.
	Port PortID
	// Weight is 1 to 100.
	Weight uint32
	// Healthy is true if the backend gets new connections.
	Healthy bool
	// Checked is as in Backend.
	Checked bool
	// Reported is true if this host reports the health of the backend. It is false without a health check.
	Reported bool
	// Source is the gateway's address from which this host checks the backend. If it is invalid and Reported is true, no
	// host can check the backend, and this host reports it as healthy.
	Source netip.Addr
}

// BackendHealth is a host's report about the health of a backend of a service IP.
type BackendHealth struct {
	VPC     VPCID
	Service ServiceIPID
	// Port or Address identifies the backend, as in Backend.
	Port    PortID
	Address netip.Addr
	Healthy bool
}

// HealthPort returns the port at which the backends are checked. The service IP must have a health check.
func (s *HostService) HealthPort() uint16 {
	if s.Health.Port != 0 || len(s.Ports) == 0 {
		return s.Health.Port
	}
	return s.Ports[0].Target
}
