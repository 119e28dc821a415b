-- The ledger's records, and its two steps, as somebody would write them who knows PostgreSQL well: a function a step, the
-- check of what is available and the change of the wallet in one statement, the wallet's row locked as late as can be.
-- Rows of a wallet leave room, so that a change needs no new index entry.

create table wallet (
	project    text primary key,
	org        text not null,
	status     smallint not null,
	available  bigint not null check (available >= 0),
	held       bigint not null check (held >= 0),
	deposited  bigint not null,
	consumed   bigint not null,
	pending    bigint not null check (pending >= 0),
	sequence   bigint not null,
	created_at bigint not null,
	updated_at bigint not null,
	check (available + held = deposited - consumed)
) with (fillfactor = 50);

create table reservation (
	id            uuid primary key,
	project       text not null,
	amount        bigint not null check (amount > 0),
	status        smallint not null,
	description   text not null,
	resource_type text not null,
	resource_id   text not null default '',
	charged       bigint not null default 0 check (charged between 0 and amount),
	ttl           bigint not null,
	deadline      bigint not null,
	created_at    bigint not null,
	created_by    text not null,
	ended_at      bigint not null default 0
) with (fillfactor = 80);

-- What the sweep of what has expired looks for.
create index reservation_due on reservation (deadline) where status = 1;

create table journal (
	project       text not null,
	sequence      bigint not null,
	id            uuid not null,
	type          smallint not null,
	amount        bigint not null check (amount > 0),
	balance_after bigint not null check (balance_after >= 0),
	description   text not null,
	resource_id   text not null,
	reservation   uuid,
	at            bigint not null,
	by            text not null,
	primary key (project, sequence)
);

create function now_ms() returns bigint language sql volatile as
	$$ select (extract(epoch from clock_timestamp()) * 1000)::bigint $$;

create function reserve(p_project text, p_id uuid, p_tx uuid, p_amount bigint, p_ttl bigint, p_description text, p_type text, p_by text)
returns bigint language plpgsql as $$
declare
	v_now bigint := now_ms();
	v_sequence bigint;
	v_balance bigint;
begin
	insert into reservation (id, project, amount, status, description, resource_type, ttl, deadline, created_at, created_by)
		values (p_id, p_project, p_amount, 1, p_description, p_type, p_ttl, v_now + p_ttl * 1000, v_now, p_by);
	update wallet set available = available - p_amount, held = held + p_amount, pending = pending + 1, sequence = sequence + 1, updated_at = v_now
		where project = p_project and status = 1 and available >= p_amount and pending < 100000
		returning sequence, available + held into v_sequence, v_balance;
	if not found then
		raise exception 'no active wallet % with % available', p_project, p_amount;
	end if;
	insert into journal (project, sequence, id, type, amount, balance_after, description, resource_id, reservation, at, by)
		values (p_project, v_sequence, p_tx, 2, p_amount, v_balance, p_description, '', p_id, v_now, p_by);
	return v_balance;
end $$;

-- An actual amount of 0 is all that was reserved; of less, the rest is released.
create function commit_reservation(p_project text, p_id uuid, p_tx uuid, p_rest uuid, p_actual bigint, p_resource text, p_by text)
returns bigint language plpgsql as $$
declare
	v_now bigint := now_ms();
	v_amount bigint;
	v_charged bigint;
	v_description text;
	v_sequence bigint;
	v_balance bigint;
begin
	update reservation set status = 2, resource_id = p_resource, charged = case p_actual when 0 then amount else p_actual end, ended_at = v_now
		where id = p_id and project = p_project and status = 1 and deadline > v_now and p_actual between 0 and amount
		returning amount, charged, description into v_amount, v_charged, v_description;
	if not found then
		raise exception 'no reservation % that % can be charged to', p_id, p_actual;
	end if;
	update wallet set available = available + v_amount - v_charged, held = held - v_amount, consumed = consumed + v_charged, pending = pending - 1,
			sequence = sequence + case when v_charged < v_amount then 2 else 1 end, updated_at = v_now
		where project = p_project and status <> 3
		returning sequence, available + held into v_sequence, v_balance;
	if not found then
		raise exception 'no open wallet %', p_project;
	end if;
	if v_charged < v_amount then
		insert into journal (project, sequence, id, type, amount, balance_after, description, resource_id, reservation, at, by)
			values (p_project, v_sequence, p_rest, 4, v_amount - v_charged, v_balance, v_description, p_resource, p_id, v_now, p_by);
		v_sequence := v_sequence - 1;
	end if;
	insert into journal (project, sequence, id, type, amount, balance_after, description, resource_id, reservation, at, by)
		values (p_project, v_sequence, p_tx, 3, v_charged, v_balance, v_description, p_resource, p_id, v_now, p_by);
	return v_balance;
end $$;
