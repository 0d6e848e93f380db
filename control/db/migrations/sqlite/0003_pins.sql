-- A pin: the version that a machine boots whatever its image's channels say, as `IMAGE@NUMBER`.
ALTER TABLE machines ADD COLUMN pin TEXT;
