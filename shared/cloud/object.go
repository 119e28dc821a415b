package cloud

// The methods IDAndName return the ID and the name of an object. The audit record of a call contains the name of the
// object that the call changes, which may be deleted or renamed later.

// IDAndName returns the ID and the name.
func (o *VM) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *Volume) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *Snapshot) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *Image) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *Node) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *VPC) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *Subnet) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *Port) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *SecurityGroup) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *RouteTable) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *Peering) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *NATGateway) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *FloatingIP) IDAndName() (id, name string) { return string(o.ID), o.Name }

// IDAndName returns the ID and the name.
func (o *ServiceIP) IDAndName() (id, name string) { return string(o.ID), o.Name }
