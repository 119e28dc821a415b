package cloud

import (
	"net/netip"
	"strings"
)

// ServiceIP is an address of a VPC that distributes connections over backends.
type ServiceIP struct {
	ID          ServiceIPID
	Name        string
	Org         OrgID
	Project     ProjectID
	Description string
	VPC         VPCID
	// Subnet is the subnet of the address, and Port the port that holds it. Both are empty if the address belongs to
	// the VPC's ServiceCIDR.
	Subnet   SubnetID
	Port     PortID
	Address  netip.Addr
	Ports    []ServicePort
	Backends []Backend
	// Selector has the labels of the ports that are the backends. It is empty if the service IP has a list of backends.
	// In the record of a service IP with a selector, Backends is empty: SelectBackends computes the backends.
	Selector map[string]string `cbor:",omitempty"`
	// Reports has the health that hosts have reported of ports that Selector selects. Reports may still contain ports
	// that are no longer selected.
	Reports      []Backend `cbor:",omitempty"`
	Health       *HealthCheck
	Affinity     Affinity
	Status       NetworkStatus
	StatusReason string
	CreatedAt    Time
	UpdatedAt    Time
}

// ServicePort is a port of a service IP, and the port of the backends to which its connections go.
type ServicePort struct {
	Name         string
	Protocol     uint8 // ProtocolTCP or ProtocolUDP
	Port, Target uint16
}

// Backend is a target of a service IP: a port of the project, or an address.
type Backend struct {
	Port    PortID
	Address netip.Addr
	Weight  uint32
	// Healthy is true if the backend gets new connections: the health check passes, or there is none.
	Healthy bool
	// Checked is true if a host has reported Healthy since the backend or its health check was set.
	Checked bool
}

// HealthCheck determines whether a backend gets new connections.
type HealthCheck struct {
	// HTTPPath is the path of a GET request, or empty for a check that opens a TCP connection.
	HTTPPath string
	// Port is 0 for the target of the first service port.
	Port            uint16
	IntervalSeconds uint32
	Unhealthy       uint32 // consecutive failures after which a backend is unhealthy
	Healthy         uint32 // consecutive successes after which it is healthy again
}

// Affinity determines which backend a connection goes to. The numbers are those of network.v1.Affinity.
type Affinity uint8

const (
	AffinityNone     Affinity = 1
	AffinityClientIP Affinity = 2
)

// Check returns an InvalidArgument fault if the fields of a service IP contradict each other. It does not check that
// the ports of backends exist.
func (s *ServiceIP) Check() error {
	if len(s.Ports) == 0 || len(s.Ports) > MaxServicePorts {
		return invalid("ports", "max_items", "must be 1 to %d, got %d", MaxServicePorts, len(s.Ports))
	}
	names, numbers := map[string]bool{}, map[ServicePort]bool{}
	for _, p := range s.Ports {
		number := ServicePort{Protocol: p.Protocol, Port: p.Port}
		switch {
		case p.Protocol != ProtocolTCP && p.Protocol != ProtocolUDP:
			return invalid("ports.protocol", "enum", "must be tcp or udp")
		case p.Port == 0 || p.Target == 0:
			return invalid("ports.port", "range", "must be 1 to 65535")
		case len(s.Ports) > 1 && p.Name == "" || names[p.Name]:
			return invalid("ports.name", "unique", "each port of a service IP with several needs a name of its own")
		case numbers[number]:
			return invalid("ports.port", "unique", "has %d twice", p.Port)
		}
		names[p.Name], numbers[number] = true, true
	}
	if err := s.checkBackends(); err != nil {
		return err
	}
	if len(s.Selector) > 0 && len(s.Backends) > 0 {
		return invalid("selector", "exclusive", "must be empty if backends are given")
	}
	if err := CheckPortLabels("selector", s.Selector); err != nil {
		return err
	}
	if s.Health != nil {
		if err := s.Health.check(); err != nil {
			return err
		}
	}
	return CheckDescription(s.Description)
}

func (s *ServiceIP) checkBackends() error {
	if len(s.Backends) > MaxBackends {
		return invalid("backends", "max_items", "must be at most %d, got %d", MaxBackends, len(s.Backends))
	}
	for _, b := range s.Backends {
		if (b.Port == "") == !b.Address.IsValid() {
			return invalid("backends", "exclusive", "each needs either port_id or address")
		}
		if b.Port != "" {
			if err := CheckUUID("backends.port_id", string(b.Port)); err != nil {
				return err
			}
		}
		if b.Weight > 100 {
			return invalid("backends.weight", "range", "must be 0 to 100, got %d", b.Weight)
		}
	}
	return nil
}

// Selects reports whether the labels of a port make it a backend. The port must belong to the service IP's VPC. It
// returns false without a selector, and for the ports of service IPs.
func (s *ServiceIP) Selects(p *Port) bool {
	if len(s.Selector) == 0 || p.VPC != s.VPC || p.Device.Kind == DeviceServiceIP {
		return false
	}
	for key, value := range s.Selector {
		if have, ok := p.Labels[key]; !ok || have != value {
			return false
		}
	}
	return true
}

// SelectBackends returns the backends of a service IP with a selector: the selected ports among those given, with the
// health in Reports. The ports must be in the order of their IDs. Only the first MaxBackends selected ports are
// returned.
func (s *ServiceIP) SelectBackends(ports []*Port) (out []Backend) {
	reports := map[PortID]Backend{}
	for _, r := range s.Reports {
		reports[r.Port] = r
	}
	for _, p := range ports {
		if !s.Selects(p) {
			continue
		}
		if len(out) == MaxBackends {
			break
		}
		b := Backend{Port: p.ID, Weight: 1, Healthy: s.Health == nil}
		if r, reported := reports[p.ID]; reported && s.Health != nil {
			b.Healthy, b.Checked = r.Healthy, r.Checked
		}
		out = append(out, b)
	}
	return out
}

func (h *HealthCheck) check() error {
	switch {
	case h.HTTPPath != "" && !strings.HasPrefix(h.HTTPPath, "/") || len(h.HTTPPath) > 255:
		return invalid("health_check.path", "path", "must begin with / and have at most 255 bytes")
	case h.IntervalSeconds < 1 || h.IntervalSeconds > 300:
		return invalid("health_check.interval_seconds", "range", "must be 1 to 300, got %d", h.IntervalSeconds)
	case h.Unhealthy < 1 || h.Unhealthy > 10 || h.Healthy < 1 || h.Healthy > 10:
		return invalid("health_check", "range", "thresholds must be 1 to 10")
	}
	return nil
}
