"""The declarative base and the column types that the tables share."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Annotated, Any, ClassVar

from sqlalchemy import BigInteger, MetaData, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP, UUID
from sqlalchemy.orm import DeclarativeBase, mapped_column

Timestamp = Annotated[dt.datetime, mapped_column(TIMESTAMP(timezone=True))]
BigInt = Annotated[int, mapped_column(BigInteger)]
Json = Annotated[dict[str, Any], mapped_column(JSONB)]
Texts = Annotated[list[str], mapped_column(ARRAY(Text))]
Uuids = Annotated[list[uuid.UUID], mapped_column(ARRAY(UUID(as_uuid=True)))]


class Base(DeclarativeBase):
    """All tables; names of constraints are fixed so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {str: Text}


def one_of(column: str, *values: str) -> str:
    """The text of a CHECK that `column` holds one of `values`."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"
